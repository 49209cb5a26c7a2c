"""Who is late, and where.

A collective that hangs tells nothing: the ranks that wait are healthy, and the one that does not come is
silent. So every rank has a thread that publishes a heartbeat to a store beside the training, whatever its
main thread does, and that ends the process with a report on all ranks when the main thread has waited for too
long. It ends it for good (``os._exit``): a main thread inside a C++ wait cannot be reached by an exception.

    rank 0 main    forward ─ backward ─ all-reduce ....................................
    rank 1 main    forward ─ (killed, stopped, elsewhere)
    rank 0 thread  beat ──── beat ───── beat ──── beat ─ ... ─ timeout ─▶ report, exit 1

Marking a place costs two attribute writes; everything else happens in the thread, about once a second. Of all ranks
that wait, one looks after the others (`standing.should_look`), so that N ranks put about N requests a second on the
store and not N squared.

Every other limit of a wait (of a process group, of shared memory) is a backstop, `BACKSTOP_SECONDS` later, for it could
not say who is missing and where.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from torch.distributed import PrefixStore, Store

from evener.errors import EvenerError, RankError, RankTimeoutError
from evener.runtime.failure import is_communication_error, is_timeout, record_failure
from evener.runtime.heartbeat import Heartbeat, MainThread, in_words
from evener.runtime.hosts import host_token
from evener.runtime.interrupt import asked
from evener.runtime.standing import Standing, may_look, must_speak, report_on, should_look

TIMEOUT_SECONDS = 300.0
BACKSTOP_SECONDS = 30.0
"""Other limits of a wait end this much later than the watchdog's, whose report says more."""

_INTERVAL_SECONDS = 1.0
_LOOKER = "looker"
_generations = itertools.count()

process_watchdogs: list[Watchdog] = []
"""Those that run in this process, the innermost last."""


def current_watchdog() -> Watchdog | None:
    """The watchdog of this process, where Evener launched it or a session is open."""
    return process_watchdogs[-1] if process_watchdogs else None


def marked(name: str) -> AbstractContextManager[object]:
    """Marks a wait for other ranks on the watchdog of this process, for code that may run without one.

    A mark that is there already stays, for it says more. Other threads than the main one have no place of their own:
    the main thread waits for them.
    """
    watchdog = current_watchdog()
    is_main = threading.current_thread() is threading.main_thread()
    if watchdog is None or not is_main or watchdog.is_waiting:
        return nullcontext()
    return watchdog.wait(name)


def standings() -> str:
    """The report on every rank, from a new line on, for a wait that ended by itself; empty without a watchdog."""
    watchdog = current_watchdog()
    return "" if watchdog is None else f"\n{watchdog.report()}"


def backstop(timeout_seconds: float) -> float:
    """When a wait that was given ``timeout_seconds`` has to end: later, where a watchdog ends it with a report."""
    return timeout_seconds if current_watchdog() is None else timeout_seconds + BACKSTOP_SECONDS


class _Place(NamedTuple):
    phase: str | None
    step: int | None
    waits: bool
    since: float
    together: str = ""


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
            explains = self._place.waits and asked() is None  # a run that was asked to stop has no time to
            if error is not None and explains and is_communication_error(error):
                explained = self._watchdog.explain(error)
                if explained is not error:
                    raise explained from error
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
        self._prefix = f"evener/watchdog/{run}/{restart}/{next(_generations)}"
        self._origin = store
        self._store = self._connect()
        self._run_dir = run_dir
        self._host = socket.gethostname()
        self._place = _Place(None, None, False, time.monotonic())
        self._progress = ""
        self._main = MainThread()
        self._count = itertools.count(1)
        self._standings = {r: Standing(r) for r in range(world_size) if r != rank}
        self._looker = Standing(-1)
        self._told = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evener-watchdog", daemon=True)

    def _connect(self) -> Store:
        return PrefixStore(self._prefix, self._origin.clone())  # type: ignore[attr-defined]

    def start(self) -> Watchdog:
        """Publishes the first heartbeat and starts the thread."""
        self._publish(self._beat())
        self._thread.start()
        return self

    def close(self) -> None:
        """Says that this rank has ended on its own, and stops the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * _INTERVAL_SECONDS)
        with suppress(RuntimeError, OSError):
            self._publish(self._beat(ended=True))

    def phase(self, name: str, step: int | None = None, *, waits: bool = False) -> Phase:
        """Marks honest work, which may take as long as it takes: ``with watchdog.phase("forward", step=41):``."""
        return Phase(self, self._at(name, step, waits))

    def wait(self, name: str, step: int | None = None) -> Phase:
        """Marks a wait for other ranks, limited by ``timeout_seconds``.

        A communication error leaves it explained.
        """
        return self.phase(name, step, waits=True)

    def together(self, name: str, step: int | None = None) -> Phase:
        """Marks what all ranks do together and what may take as long as it takes, such as saving a checkpoint.

        While a few ranks write, the others may wait for them beyond ``timeout_seconds``, in whatever is marked inside.
        The run ends when a rank was missing for that long: dead, stopped, silent, or not in a block of this name and
        step. The waits themselves need a limit that is longer: that of `Session.patient_group`.
        """
        place = self._at(name, step, False)
        return Phase(self, place._replace(together=in_words(name, place.step)))

    def _at(self, name: str, step: int | None, waits: bool) -> _Place:
        """A place within a step, where none is named, belongs to the step around it."""
        around = self._place
        return _Place(name, around.step if step is None else step, waits, time.monotonic(), around.together)

    def explained(self) -> Phase:
        """Communication errors leave the block explained, under the mark of the phase around it."""
        return Phase(self, self._place._replace(waits=True, since=time.monotonic()))

    @property
    def is_waiting(self) -> bool:
        """Whether the innermost mark is that of a wait."""
        return self._place.waits

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
        """Where every rank stands and for how long, one line each, the late ones first.

        Where the store does not answer, as far as it was known before.
        """
        with suppress(RuntimeError, OSError):
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
        with suppress(RuntimeError, OSError):
            while time.monotonic() < deadline:
                self._refresh()
                if any(standing.is_lost(self._interval) for standing in self._standings.values()):
                    return
                time.sleep(self._interval / 2)

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
            together=place.together,
            token=host_token(),
            ended=ended,
        )

    def _publish(self, beat: Heartbeat) -> None:
        text = beat.to_json()
        if self._run_dir is not None:
            with suppress(OSError):  # a full disk is no reason to fall silent
                partial = self._run_dir / f"beat-{self.rank}.partial"
                partial.write_text(text)
                partial.replace(self._run_dir / f"beat-{self.rank}")
        if self.world_size > 1:
            self._store.set(str(self.rank), text)

    def _refresh(self) -> None:
        with self._lock:
            unheard = [str(standing.rank) for standing in self._standings.values() if standing.beat is None]
            silent = set(absent(self._store, unheard))
            known = [rank for rank in self._standings if str(rank) not in silent]
            texts = self._store.multi_get([str(rank) for rank in known]) if known else []
            for rank, text in zip(known, texts, strict=True):
                self._standings[rank].update(Heartbeat.from_json(text))

    def _run(self) -> None:
        """Goes on after any error, for a rank without a watchdog hangs in silence, until the store is gone."""
        failures = 0
        while not self._stop.wait(self._interval):
            try:
                self._tick()
                failures = 0
            except (RuntimeError, OSError) as error:
                failures += 1
                if failures > 1 and not self._reconnected():
                    return  # and with the store the run is gone
                if failures > 2:  # the store answers
                    self._tell(error)
            except Exception as error:
                self._tell(error)

    def _tell(self, error: Exception) -> None:
        """Shows an error of the watchdog's own, once: it is silent otherwise, and would hide what is wrong with it."""
        if self._told:
            return
        self._told = True
        with suppress(OSError, ValueError):  # nobody listens, or standard error is closed
            trace = "".join(traceback.format_exception(error))
            print(
                f"the watchdog of rank {self.rank} failed, and goes on:\n{trace}",
                file=sys.stderr,
                end="",
                flush=True,
            )

    def _reconnected(self) -> bool:
        """A connection that broke stays broken; a new one can be made only while there is a store."""
        try:
            self._store = self._connect()
        except (RuntimeError, OSError):
            return False
        return True

    def _tick(self) -> None:
        beat = self._beat()
        self._publish(beat)
        if may_look(beat, self.timeout_seconds) and self._looks(beat):
            self._refresh()
            others = self._standings.values()
            for other in others:
                other.compare(beat, self._interval)
            if must_speak(beat, others, self.timeout_seconds, self._interval):
                self._speak(beat)

    def _looks(self, beat: Heartbeat) -> bool:
        """Whether it is this rank that looks after all others, of which it then leaves word for the next ones.

        Two ranks may say so at once. The one that is not to look finds the other's word a heartbeat later.
        """
        if self._store.check([_LOOKER]):
            self._looker.update(Heartbeat.from_json(self._store.get(_LOOKER)))
        looks = should_look(beat, self._looker, self._interval)
        if looks:
            self._store.set(_LOOKER, beat.to_json())
        return looks

    def _speak(self, beat: Heartbeat) -> None:
        """Ends the process whatever happens on the way."""
        try:
            error = RankTimeoutError(
                f"{self._complaint(beat)} (timeout {self.timeout_seconds:g} s)\n{self.report()}"
            )
            if self._run_dir is None:
                print(f"RankTimeoutError: {error}", file=sys.stderr, flush=True)
            record_failure(error, self.rank)
        finally:
            os._exit(1)

    def _complaint(self, beat: Heartbeat) -> str:
        if not beat.together:
            return f"rank {self.rank} has waited {beat.seconds:.0f} s in {beat.place}"
        lost = [s for s in self._standings.values() if s.apart_seconds >= self.timeout_seconds]
        who = ", ".join(str(standing.rank) for standing in lost)
        seconds = max(standing.apart_seconds for standing in lost)
        return (
            f"rank {who} was missing for {seconds:.0f} s from {beat.together}, in which rank {self.rank} is"
        )


def absent(store: Store, keys: list[str]) -> list[str]:
    """Those of ``keys`` that nobody has set: one question where there are none, else by halves."""
    if not keys or store.check(keys):
        return []
    if len(keys) == 1:
        return keys
    middle = len(keys) // 2
    return absent(store, keys[:middle]) + absent(store, keys[middle:])
