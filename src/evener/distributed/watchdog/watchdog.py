"""Who is late, and where.

A collective that hangs tells nothing: the ranks that wait are healthy, and the one that does not come is
silent. So every rank has a thread that publishes a heartbeat to a store beside the training, whatever its
main thread does, and that ends the process with a report on all ranks when the main thread has waited for too
long. It ends it for good (``os._exit``): a main thread inside a C++ wait cannot be reached by an exception.

    rank 0 main    forward ─ backward ─ all-reduce ....................................
    rank 1 main    forward ─ (killed, stopped, elsewhere)
    rank 0 thread  beat ──── beat ───── beat ──── beat ─ ... ─ timeout ─▶ report, exit 1

Marking a place costs two attribute writes; everything else happens in the thread, about once a second. What it takes
for the end is in :mod:`evener.distributed.watchdog.hang_rules`. A thread that does not get Python's lock speaks of
nothing; then that of another rank does, or the launcher (:mod:`evener.distributed.launch.launcher_watchdog`).

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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch.distributed import Store

from evener.core.phase_marks import process_watchdogs
from evener.core.stacks import listen
from evener.distributed.failure import is_timeout, record_failure
from evener.distributed.hosts import host_token
from evener.distributed.recovery.replacement import may_be_recalled
from evener.distributed.restart_count import next_name
from evener.distributed.watchdog.hang_rules import complaint, left_words, may_look, verdict
from evener.distributed.watchdog.heartbeat import Heartbeat, MainThread, awaited_threads, in_words
from evener.distributed.watchdog.idle_time import Activity
from evener.distributed.watchdog.peer_state import Standing, report_on
from evener.distributed.watchdog.peers import Roster
from evener.distributed.watchdog.phase import Phase, Place
from evener.distributed.watchdog.stall import Stall, is_stalled
from evener.distributed.watchdog.store_health import Keeper
from evener.errors import EvenerError, RankError, RankTimeoutError

TIMEOUT_SECONDS = 300.0
BACKSTOP_SECONDS = 30.0
"""Other limits of a wait end this much later than the watchdog's, whose report says more."""

_INTERVAL_SECONDS = 1.0


def current_watchdog() -> Watchdog | None:
    """The watchdog of this process, where Evener launched it or a session is open."""
    last = process_watchdogs[-1] if process_watchdogs else None
    return last if isinstance(last, Watchdog) else None


def standings() -> str:
    """The report on every rank, from a new line on, for a wait that ended by itself; empty without a watchdog."""
    watchdog = current_watchdog()
    return "" if watchdog is None else f"\n{watchdog.report()}"


def departed(words: str) -> str:
    """``words``, after those of the watchdog if it knows that a rank has left on its own."""
    watchdog = current_watchdog()
    told = "" if watchdog is None else watchdog.departure()
    return f"{told}\n({words})" if told else words


def backstop(timeout_seconds: float) -> float:
    """When a wait that was given ``timeout_seconds`` has to end: later, where a watchdog ends it with a report."""
    return timeout_seconds if current_watchdog() is None else timeout_seconds + BACKSTOP_SECONDS


class Watchdog:
    """The heartbeat of this rank, and its view of all others.

    Args:
        store: Where heartbeats are kept; every rank sees the same one.
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
        run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
        self._roster = Roster(rank, world_size, store, f"evener/{run}/{next_name('watchdog')}")
        self._keeper = Keeper()
        self._run_dir = run_dir
        self._host = socket.gethostname()
        self.place = Place(None, None, False, time.monotonic())
        self._progress = ""
        self._main = MainThread()
        self._activity = Activity()
        self._marks = 0
        self._count = itertools.count(1)
        self._told = False
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
        """Says that this rank has ended on its own, its process with ``status`` if it does too; stops the thread.

        Args:
            works_on: Threads that it leaves may be part of its work.
        """
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * _INTERVAL_SECONDS)
        with suppress(RuntimeError, OSError):
            last = replace(self._beat(), threads=awaited_threads(), works_on=works_on)
            self._publish(replace(last, ended=True, status=status))
        self._roster.close()

    def show(self, line: Callable[[str], None] | None) -> None:
        """Has ``line`` called about once a second with who waits for whom while nothing moves, then with ``""``."""
        self._stall.show = line

    def hush(self) -> None:
        """This rank is called away from those that it watches: whatever they do, it ends nothing for it."""
        self._stop.set()

    def stand_down(self) -> None:
        """As :meth:`close`, without a word to the others: this rank goes on, with another watchdog."""
        self._stop.set()
        self._thread.join(timeout=2 * _INTERVAL_SECONDS)
        self._roster.close()

    def phase(self, name: str, step: int | None = None, *, waits: bool = False) -> Phase:
        """Marks honest work: ``with watchdog.phase("forward", step=41):``.

        It may take as long as it takes while no other rank waits for it, and something is marked now and then, here or
        on another rank; see `moved`.
        """
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

    def _at(self, name: str, step: int | None, waits: bool) -> Place:
        """A place within a step, where none is named, belongs to the step around it."""
        around = self.place
        return Place(name, around.step if step is None else step, waits, time.monotonic(), around.together)

    def explained(self) -> Phase:
        """Communication errors leave the block explained, under the mark of the phase around it."""
        return Phase(self, self.place._replace(waits=True, since=time.monotonic()))

    @property
    def is_waiting(self) -> bool:
        """Whether the innermost mark is that of a wait."""
        return self.place.waits

    def progress(self, text: str) -> None:
        """Says where the run stands, as an interrupted run will: ``step 41 of 400, epoch 2 of 5``."""
        self._progress = text
        self.moved()

    def moved(self) -> None:
        """Says that the rank makes progress within its phase."""
        self._marks += 1

    @property
    def _interval(self) -> float:
        return min(_INTERVAL_SECONDS, self.timeout_seconds / 5)

    @property
    def progress_text(self) -> str:
        """What was last said to `progress`."""
        return self._progress

    def report(self, stacks: bool = False) -> str:
        """Where every rank stands and for how long, one line each, the late ones first; with ``stacks``, theirs.

        Where the store does not answer, as far as it was known before.
        """
        with suppress(RuntimeError, OSError):
            if not self._keeper.is_lost_for(0.0):
                self._roster.refresh()
        standings = [*self._roster.others, Standing(self.rank, self._beat())]
        return report_on(standings, self._roster.stacks(standings) if stacks else None)

    def explain(self, error: BaseException) -> EvenerError:
        """The error that names the ranks which are gone or late, for one that a collective raised.

        Takes up to a few heartbeats, until it is known who is missing. An `EvenerError` is returned as it is.
        """
        if isinstance(error, EvenerError):
            return error
        text = str(error).strip().splitlines()
        if may_be_recalled():
            return RankError(f"rank {self.rank} lost other ranks in {self._beat().place}: {text[:1]}")
        place, told = self._beat().place, self.departure()
        kind = RankTimeoutError if is_timeout(error) else RankError
        lost = told or f"rank {self.rank} lost other ranks in {place}\n{self.report(stacks=True)}"
        return kind(f"{lost}\n({text[0] if text else error!r})")

    def departure(self) -> str:
        """Which ranks have left, and a report on all; empty if it is not known of any within a few heartbeats.

        Empty too where a rank that is gone is replaced, and this one has no time to lose.
        """
        if may_be_recalled():
            return ""
        self._roster.find_lost(self._interval)
        words = left_words(self._beat(), self._roster.others)
        return f"{words}\n{self.report()}" if words else ""

    def _beat(self) -> Heartbeat:
        place, sample, now = self.place, self._main.look(), time.monotonic()
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
            with suppress(OSError):  # a full disk is no reason to fall silent
                partial = self._run_dir / f"beat-{self.rank}.partial"
                partial.write_text(beat.to_json())
                partial.replace(self._run_dir / f"beat-{self.rank}")
        self._roster.publish(beat)

    def _run(self) -> None:
        """Goes on after any error, for a rank without a watchdog hangs in silence."""
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
                self._tell(error)

    def _store_answers(self, error: Exception, failures: int) -> bool:
        """A store that is silent may be stopped for a while; one whose connection broke twice is asked anew."""
        if not isinstance(error, TimeoutError):
            if failures == 1:
                return True
            with suppress(RuntimeError, OSError):
                self._roster.reconnect()
                if failures > 2:
                    self._tell(error)
                return True
        self._keeper.silent()
        return False

    def _go_on_alone(self) -> None:
        """Without a store nobody knows of the others, but that a wait is hopeless is known all the same."""
        beat = self._beat()
        if beat.stuck_seconds >= self.timeout_seconds:
            doing = (
                f"waited {beat.seconds:.0f} s in"
                if beat.waits
                else f"made no progress for {beat.idle:.0f} s in"
            )
            self._speak(f"rank {self.rank} has {doing} {beat.place}, and {self._keeper.words}", aloud=True)

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

    def _tick(self) -> None:
        self._activity.look(self._marks, self._interval, self._main.look().debugs)
        beat = self._beat()
        if self._keeper.stopped_seconds() >= self.timeout_seconds:
            self._speak(f"the run is left alone: {self._keeper.words}", aloud=True)
        self._publish(beat)
        self._keeper.heard()
        self._roster.answer()
        looks = may_look(beat, self.timeout_seconds) and self._roster.looks(beat, self._interval)
        if looks:
            self._look_after_others(beat)
        elif self._stall.show is not None and is_stalled(beat) and self._roster.others:
            self._roster.refresh()
        self._stall.tell(beat, self._roster.others, looks)

    def _look_after_others(self, beat: Heartbeat) -> None:
        limits = self.timeout_seconds, self._interval
        others = self._roster.others
        if others:
            self._roster.refresh()
        for other in others:
            other.compare(beat, self._interval)
        why = verdict(beat, others, *limits)
        if why is not None:
            self._speak(
                complaint(why, beat, others, *limits), RankError if why == "left" else RankTimeoutError
            )

    def _speak(self, words: str, kind: type[EvenerError] = RankTimeoutError, aloud: bool = False) -> None:
        """Ends the process whatever happens on the way; ``aloud`` where no launcher may ever say it."""
        try:
            error = kind(f"{words}\n{self.report(stacks=True)}")
            if self._run_dir is None or (aloud and os.environ.get("LOCAL_RANK", "0") == "0"):
                print(f"{kind.__name__}: {error}", file=sys.stderr, flush=True)
            record_failure(error, self.rank)
        finally:
            os._exit(1)
