"""Who is late, and where.

A collective that hangs tells nothing: the ranks that wait are healthy, and the one that does not come is
silent. So every rank has a thread that publishes a heartbeat to a store beside the training, whatever its
main thread does, and that ends the process with a report on all ranks when the main thread has waited for too
long. It ends it for good (``os._exit``): a main thread inside a C++ wait cannot be reached by an exception.

    rank 0 main    forward ─ backward ─ all-reduce ....................................
    rank 1 main    forward ─ (killed, stopped, elsewhere)
    rank 0 thread  beat ──── beat ───── beat ──── beat ─ ... ─ timeout ─▶ report, exit 1

Marking a place costs two attribute writes; everything else happens in the thread, about once a second.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store

from evener.errors import EvenerError, RankError, RankTimeoutError
from evener.runtime.failure import is_communication_error, is_timeout, record_failure
from evener.runtime.heartbeat import Heartbeat, MainThread
from evener.runtime.standing import Standing, must_speak, report_on

TIMEOUT_SECONDS = 300.0
_INTERVAL_SECONDS = 1.0
_generations = itertools.count()


class _Place(NamedTuple):
    phase: str | None
    step: int | None
    waits: bool
    since: float


class Phase:
    """Marks where the rank is while the block runs; made by `Watchdog.phase` and `Watchdog.wait`."""

    __slots__ = ("_before", "_place", "_watchdog")

    def __init__(self, watchdog: Watchdog, place: _Place) -> None:
        self._watchdog, self._place = watchdog, place

    def __enter__(self) -> None:
        self._before = self._watchdog._place
        self._watchdog._place = self._place

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and self._place.waits and is_communication_error(error):
                raise self._watchdog.explain(error) from error
        finally:
            self._watchdog._place = self._before


class Watchdog:
    """The heartbeat of this rank, and its view of all others.

    Args:
        store: Where heartbeats are kept; every rank sees the same one. It is cloned, so that a wait of the
            main thread on its own client does not hold up the heartbeat.
        timeout_seconds: How long this rank waits for others before the run ends.
        run_dir: Where the launcher of this machine looks for heartbeats, if it is Evener's.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        timeout_seconds: float = TIMEOUT_SECONDS,
        run_dir: Path | None = None,
    ) -> None:
        self.rank, self.world_size, self.timeout_seconds = rank, world_size, timeout_seconds
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
        prefix = f"evener/watchdog/{run}/{restart}/{next(_generations)}"
        self._store = PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
        self._run_dir = run_dir
        self._host = socket.gethostname()
        self._place = _Place(None, None, False, time.monotonic())
        self._progress = ""
        self._main = MainThread()
        self._count = itertools.count(1)
        self._standings = {r: Standing(r) for r in range(world_size) if r != rank}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evener-watchdog", daemon=True)

    def start(self) -> Watchdog:
        """Publishes the first heartbeat and starts the thread."""
        self._publish(self._beat())
        self._thread.start()
        return self

    def close(self) -> None:
        """Says that this rank has ended on its own, and stops the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5 * _INTERVAL_SECONDS)
        with suppress(RuntimeError, OSError):
            self._publish(self._beat(ended=True))

    def phase(self, name: str, step: int | None = None, *, waits: bool = False) -> Phase:
        """Marks honest work: ``with watchdog.phase("forward", step=41):``. It may take as long as it
        takes.
        """
        return Phase(self, _Place(name, self._step(step), waits, time.monotonic()))

    def wait(self, name: str, step: int | None = None) -> Phase:
        """Marks a wait for other ranks, limited by ``timeout_seconds``; a communication error leaves it
        explained.
        """
        return Phase(self, _Place(name, self._step(step), True, time.monotonic()))

    def _step(self, step: int | None) -> int | None:
        """A place within a step, where none is named, belongs to the step around it."""
        return self._place.step if step is None else step

    def explained(self) -> Phase:
        """Communication errors leave the block explained, under the mark of the phase around it."""
        return Phase(self, self._place._replace(waits=True, since=time.monotonic()))

    def progress(self, text: str) -> None:
        """Says where the run stands, as an interrupted run will: ``step 41 of 400, epoch 2 of 5``."""
        self._progress = text

    @property
    def _interval(self) -> float:
        return min(_INTERVAL_SECONDS, self.timeout_seconds / 5)

    @property
    def progress_text(self) -> str:
        """What was last said to `progress`."""
        return self._progress

    def report(self) -> str:
        """Where every rank stands and for how long, one line each, the late ones first."""
        self._refresh()
        return report_on([*self._standings.values(), Standing(self.rank, self._beat())])

    def explain(self, error: BaseException) -> EvenerError:
        """The error that names the ranks which are gone or late, for one that a collective raised.

        Takes up to a few heartbeats, until it is known who is missing. An `EvenerError` is returned as it is.
        """
        if isinstance(error, EvenerError):
            return error
        place = self._beat().place
        self._find_missing()
        text = str(error).strip().splitlines()
        kind = RankTimeoutError if is_timeout(error) else RankError
        return kind(
            f"rank {self.rank} lost other ranks in {place}\n{self.report()}\n({text[0] if text else error!r})"
        )

    def _find_missing(self) -> None:
        deadline = time.monotonic() + 4 * self._interval
        while time.monotonic() < deadline:
            self._refresh()
            if any(standing.is_lost(self._interval) for standing in self._standings.values()):
                return
            time.sleep(self._interval / 4)

    def _beat(self, ended: bool = False) -> Heartbeat:
        place, sample, now = self._place, self._main.look(), time.monotonic()
        waits = place.waits or sample.call is not None
        return Heartbeat(
            rank=self.rank,
            host=self._host,
            pid=os.getpid(),
            count=next(self._count),
            time=time.time(),
            phase=place.phase or sample.call,
            step=place.step,
            waits=waits,
            seconds=now - place.since if place.waits or not waits else sample.still_seconds,
            where=sample.where,
            progress=self._progress,
            ended=ended,
        )

    def _publish(self, beat: Heartbeat) -> None:
        text = beat.to_json()
        if self.world_size > 1:
            self._store.set(str(self.rank), text)
        if self._run_dir is not None:
            partial = self._run_dir / f"beat-{self.rank}.partial"
            partial.write_text(text)
            partial.replace(self._run_dir / f"beat-{self.rank}")

    def _refresh(self) -> None:
        with self._lock:
            known = [rank for rank in self._standings if self._store.check([str(rank)])]
            texts = self._store.multi_get([str(rank) for rank in known]) if known else []
            for rank, text in zip(known, texts, strict=True):
                self._standings[rank].update(Heartbeat.from_json(text))

    def _run(self) -> None:
        """Ends quietly when the store is gone, for then the run is."""
        with suppress(RuntimeError, OSError):
            while not self._stop.wait(self._interval):
                beat = self._beat()
                self._publish(beat)
                if beat.waits and beat.seconds > self.timeout_seconds / 3:
                    self._refresh()
                others = self._standings.values()
                if must_speak(beat, others, self.timeout_seconds, self._interval):
                    self._speak(beat)

    def _speak(self, beat: Heartbeat) -> None:
        error = RankTimeoutError(
            f"rank {self.rank} has waited {beat.seconds:.0f} s in {beat.place} "
            f"(timeout {self.timeout_seconds:g} s)\n{self.report()}"
        )
        record_failure(error, self.rank)
        if self._run_dir is None:
            print(f"RankTimeoutError: {error}", file=sys.stderr, flush=True)
        os._exit(1)
