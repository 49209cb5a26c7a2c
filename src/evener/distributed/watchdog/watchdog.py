"""The watchdog of a rank: publishes heartbeats, detects hangs, and reports which rank is late and where it is.

A collective that hangs reports nothing: the waiting ranks are healthy, and the missing rank is silent. So every rank
has a thread that publishes a heartbeat to a store, whatever its main thread does. If the main thread has waited for too
long, the watchdog thread ends the process with a report on all ranks. It uses ``os._exit``, because an exception cannot
reach a main thread inside a C++ wait.

    rank 0 main    forward ─ backward ─ all-reduce ....................................
    rank 1 main    forward ─ (killed, stopped, elsewhere)
    rank 0 thread  beat ──── beat ───── beat ──── beat ─ ... ─ timeout ─▶ report, exit 1

Marking a phase costs two attribute writes; everything else happens in the thread, about once a second. The conditions
for ending a run are in :mod:`evener.distributed.watchdog.hang_rules`. A watchdog thread that does not get the GIL
cannot report; then another rank's watchdog does, or the launcher's
(:mod:`evener.distributed.launch.launcher_watchdog`).

All other timeouts of waits (of process groups, of shared memory) are `BACKSTOP_SECONDS` longer, because they could not
say which rank is missing and where it is.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch.distributed import Store

from evener.core.config.time_limit import TIMEOUT_SECONDS
from evener.core.phase_marks import process_watchdogs
from evener.core.stacks import listen
from evener.core.stdio import to_stderr
from evener.distributed.failure import is_timeout, record_failure
from evener.distributed.hosts import host_token
from evener.distributed.recovery.replacement import may_be_recalled
from evener.distributed.restart_count import next_name
from evener.distributed.watchdog.hang_rules import complaint, departure_message, may_look, verdict
from evener.distributed.watchdog.heartbeat import (
    INTERVAL_SECONDS,
    Heartbeat,
    MainThread,
    awaited_threads,
    format_phase,
    interval_of,
)
from evener.distributed.watchdog.idle_time import Activity
from evener.distributed.watchdog.peer_state import PeerState, late_rank, report_on
from evener.distributed.watchdog.peers import PeerStates
from evener.distributed.watchdog.phase import Phase, PhaseMark
from evener.distributed.watchdog.stall import Stall, is_stalled
from evener.distributed.watchdog.store_health import StoreHealth
from evener.errors import EvenerError, RankError, RankTimeoutError

BACKSTOP_SECONDS = 30.0
"""Other timeouts are this much longer than the watchdog's, whose report says more."""


def current_watchdog() -> Watchdog | None:
    """Returns the watchdog of this process. Returns None if Evener did not launch it and no session is open."""
    last = process_watchdogs[-1] if process_watchdogs else None
    return last if isinstance(last, Watchdog) else None


def standings() -> str:
    """Returns the report on every rank, preceded by a newline, to append to an error; empty without a watchdog."""
    watchdog = current_watchdog()
    return "" if watchdog is None else f"\n{watchdog.report()}"


def departed(message: str) -> str:
    """Returns ``message``, preceded by the watchdog's message if it knows that a rank has left."""
    watchdog = current_watchdog()
    departure = "" if watchdog is None else watchdog.departure()
    return f"{departure}\n({message})" if departure else message


def backstop(timeout_seconds: float) -> float:
    """Returns the timeout for a wait: longer than ``timeout_seconds`` if a watchdog would end it with a report."""
    return timeout_seconds if current_watchdog() is None else timeout_seconds + BACKSTOP_SECONDS


class Watchdog:
    """Publishes the heartbeat of this rank and watches all other ranks.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        store: Store for the heartbeats, shared by all ranks.
        timeout_seconds: How long this rank waits for others before the run ends.
        run_dir: Directory in which Evener's launcher reads heartbeats; None without that launcher.
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
        run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
        self._roster = PeerStates(rank, world_size, store, f"evener/{run}/{next_name('watchdog')}")
        self._keeper = StoreHealth()
        self._run_dir = run_dir
        self._host = socket.gethostname()
        self.place = PhaseMark(None, None, False, time.monotonic())
        self._progress = ""
        self._main = MainThread()
        self._activity = Activity()
        self._marks = 0
        self._count = itertools.count(1)
        self._has_failed = False
        self._stall = Stall()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evener-watchdog", daemon=True)

    def start(self) -> Watchdog:
        """Publishes the first heartbeat and starts the thread."""
        listen()
        self._publish(self._beat())
        self._thread.start()
        return self

    def close(self, status: int | None = None, works_on: bool = False) -> None:
        """Publishes that this rank has left by itself, and stops the thread.

        Args:
            status: Exit status if the process ends too; else None.
            works_on: True if threads that are still running may be part of the rank's work.
        """
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * INTERVAL_SECONDS)
        with suppress(RuntimeError, OSError):
            last = replace(self._beat(), threads=awaited_threads(), works_on=works_on)
            self._publish(replace(last, ended=True, status=status))
        self._roster.close()

    def show(self, line: Callable[[str], None] | None) -> None:
        """Sets a callback that is called about once a second with who waits for whom while the run stalls, then with
        ``""``."""
        self._stall.show = line

    def hush(self) -> None:
        """Stops watching without waiting for the thread, because this rank is recalled to another start."""
        self._stop.set()

    def stand_down(self) -> None:
        """Stops the thread like :meth:`close`, but publishes nothing: this rank goes on with another watchdog."""
        self._stop.set()
        self._thread.join(timeout=2 * INTERVAL_SECONDS)
        self._roster.close()

    def phase(
        self, name: str, step: int | None = None, *, waits: bool = False, explains: bool = False
    ) -> Phase:
        """Marks a phase of this rank's own work: ``with watchdog.phase("forward", step=41):``.

        It has no time limit while no other rank waits for this one and some rank makes progress; see `moved`.

        Args:
            waits: True for a wait; see `wait`.
            explains: Replaces communication errors in the block by those of `explain`, as a wait does.
        """
        return Phase(self, self._at(name, step, waits), explains)

    def wait(self, name: str, step: int | None = None) -> Phase:
        """Marks a wait for other ranks, limited by ``timeout_seconds``.

        A communication error in the block is replaced by that of `explain`, which names the missing ranks.
        """
        return self.phase(name, step, waits=True)

    def together(self, name: str, step: int | None = None) -> Phase:
        """Marks an operation of all ranks together that has no time limit, such as saving a checkpoint.

        While a few ranks write, the others may wait for them longer than ``timeout_seconds``, in any phase marked
        inside. The run ends when a rank was missing for that long: dead, stopped, silent, or not in a block of this
        name and step. The waits themselves need a longer timeout: that of `Session.patient_group`.
        """
        place = self._at(name, step, False)
        return Phase(self, place._replace(together=format_phase(name, place.step)))

    def _at(self, name: str, step: int | None, waits: bool) -> PhaseMark:
        """Creates a mark. Without a step it takes the step of the enclosing phase."""
        around = self.place
        return PhaseMark(
            name, around.step if step is None else step, waits, time.monotonic(), around.together
        )

    def explained(self) -> Phase:
        """Replaces communication errors in the block by those of `explain`. Keeps the name of the enclosing phase."""
        return Phase(self, self.place._replace(waits=True, since=time.monotonic()))

    @property
    def is_waiting(self) -> bool:
        """True if the innermost mark is a wait."""
        return self.place.waits

    def progress(self, text: str) -> None:
        """Sets the position of the run for reports: ``step 41 of 400, epoch 2 of 5``. Counts as progress."""
        self._progress = text
        self.moved()

    def moved(self) -> None:
        """Records that the rank makes progress within its phase."""
        self._marks += 1

    @property
    def _interval(self) -> float:
        return interval_of(self.timeout_seconds)

    @property
    def progress_text(self) -> str:
        """Position of the run that was last set with `progress`."""
        return self._progress

    def report(self, stacks: bool = False) -> str:
        """Returns where every rank is and for how long, one line each, late ranks first.

        If the store does not answer, the report uses the heartbeats that were read before.

        Args:
            stacks: Adds the stacks of the ranks that others wait for.
        """
        with suppress(RuntimeError, OSError):
            if not self._keeper.is_lost_for(0.0):
                self._roster.refresh()
        standings = [*self._roster.others, PeerState(self.rank, self._beat())]
        return report_on(standings, self._roster.stacks(standings) if stacks else None)

    def explain(self, error: BaseException) -> EvenerError:
        """Returns, for an error that a collective raised, an error that names the ranks which are gone or late.

        Takes up to a few heartbeats, until a missing rank is known. Returns an `EvenerError` unchanged.
        """
        if isinstance(error, EvenerError):
            return error
        text = str(error).strip().splitlines()
        if may_be_recalled():
            return RankError(f"rank {self.rank} lost other ranks in {self._beat().place}: {text[:1]}")
        place, departure = self._beat().place, self.departure()
        kind = RankTimeoutError if is_timeout(error) else RankError
        lost = departure or f"rank {self.rank} lost other ranks in {place}\n{self.report(stacks=True)}"
        return kind(f"{lost}\n({text[0] if text else error!r})")

    def departure(self) -> str:
        """Returns which ranks have left, and a report on all. Waits a few heartbeats; empty if none is known to have.

        Also empty if this rank stays while a lost rank is replaced: then there is no time for a report.
        """
        if may_be_recalled():
            return ""
        self._roster.find_lost(self._interval)
        departed = departure_message(self._beat(), self._roster.others)
        return f"{departed}\n{self.report()}" if departed else ""

    def _beat(self) -> Heartbeat:
        place, sample, now = self.place, self._main.take_sample(), time.monotonic()
        waits = place.waits or sample.call is not None
        return Heartbeat(
            rank=self.rank,
            host=self._host,
            pid=os.getpid(),
            count=next(self._count),
            time=time.monotonic(),
            phase=place.phase if place.waits else sample.call or place.phase,
            step=place.step,
            waits=waits,
            seconds=now - place.since if place.waits or not waits else sample.still_seconds,
            where=sample.where,
            progress=self._progress,
            together=place.together,
            token=host_token(),
            idle=0.0 if place.together else self._activity.idle_seconds(place.phase is not None),
            payload="" if place.waits else sample.payload,
            limit=self.timeout_seconds,
            still=sample.still_seconds,
        )

    def _publish(self, beat: Heartbeat) -> None:
        if self._run_dir is not None:
            with suppress(OSError):  # a full disk must not stop the heartbeats
                partial = self._run_dir / f"beat-{self.rank}.partial"
                partial.write_text(beat.to_json())
                partial.replace(self._run_dir / f"beat-{self.rank}")
        self._roster.publish(beat)

    def _run(self) -> None:
        """Body of the thread. Continues after any error, because a rank without a watchdog could hang unnoticed."""
        failures = 0
        while not self._stop.wait(self._interval):
            try:
                self._tick()
                failures = 0
            except (RuntimeError, OSError) as error:
                failures += 1
                if not self._store_answers(error, failures) and self._keeper.is_lost_for(self._interval):
                    self._go_on_alone()
            except Exception as error:
                self._report_failure(error)

    def _store_answers(self, error: Exception, failures: int) -> bool:
        """Handles an error of the store. Returns False if the store does not answer.

        A timeout may mean that the store's process is stopped. After a second broken connection, reconnects.
        """
        if not isinstance(error, TimeoutError):
            if failures == 1:
                return True
            with suppress(RuntimeError, OSError):
                self._roster.reconnect()
                if failures > 2:
                    self._report_failure(error)
                return True
        self._keeper.silent()
        return False

    def _go_on_alone(self) -> None:
        """Ends a wait that exceeded the timeout while the store is lost, so that nothing is known of other ranks."""
        beat = self._beat()
        if beat.stuck_seconds >= self.timeout_seconds:
            doing = (
                f"waited {beat.seconds:.0f} s in"
                if beat.waits
                else f"made no progress for {beat.idle:.0f} s in"
            )
            self._end_process(
                f"rank {self.rank} has {doing} {beat.place}, and {self._keeper.description}", aloud=True
            )

    def _report_failure(self, error: Exception) -> None:
        """Prints an internal error of the watchdog, only the first time. It would be invisible otherwise."""
        if self._has_failed:
            return
        self._has_failed = True
        trace = "".join(traceback.format_exception(error)).rstrip()
        to_stderr(f"the watchdog of rank {self.rank} failed, and goes on:\n{trace}")

    def _tick(self) -> None:
        self._activity.update(self._marks, self._interval, self._main.take_sample().debugs)
        beat = self._beat()
        if self._keeper.stopped_seconds() >= self.timeout_seconds:
            self._end_process(f"the run is left alone: {self._keeper.description}", aloud=True)
        self._publish(beat)
        self._keeper.heard()
        self._roster.answer()
        looks = may_look(beat) and self._roster.looks(beat)
        if looks:
            self._look_after_others(beat)
        else:
            for other in self._roster.others:
                other.lose_sight()
            if self._stall.show is not None and is_stalled(beat) and self._roster.others:
                self._roster.refresh()
        self._stall.tell(beat, self._roster.others, looks)

    def _look_after_others(self, beat: Heartbeat) -> None:
        others = self._roster.others
        if others:
            self._roster.refresh()
        for other in others:
            other.compare(beat)
        why = verdict(beat, others)
        if why is not None:
            self._end_process(complaint(why, beat, others), RankError if why == "left" else RankTimeoutError)

    def _end_process(
        self, message: str, kind: type[EvenerError] = RankTimeoutError, aloud: bool = False
    ) -> None:
        """Records the error and ends the process in any case. Evener's launcher prints the recorded error; ``aloud``
        makes local rank 0 print it too, for cases in which the launcher may be stopped."""
        try:
            error = kind(f"{message}\n{self.report(stacks=True)}")
            error.rank = late_rank(self._roster.others)
            if self._run_dir is None or (aloud and os.environ.get("LOCAL_RANK", "0") == "0"):
                print(f"{kind.__name__}: {error}", file=sys.stderr, flush=True)
            record_failure(error, self.rank)
        finally:
            os._exit(1)
