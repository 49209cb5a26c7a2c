"""The launcher's own watch over its ranks, for the hang in which no rank can speak.

A call in native code that holds Python's lock silences the watchdog of its rank. While one rank is left that waits, it
names the silent one; where all ranks of this machine are silent, or stopped, only the launcher can. So it is for ranks
that have no watchdog yet (:mod:`evener.distributed.launch.start_watch`), or have done their work
(:mod:`evener.distributed.launch.exit_watch`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from evener.core.stacks import stacks_of
from evener.distributed.launch.exit_watch import Ends
from evener.distributed.launch.start_watch import Starts
from evener.distributed.watchdog.heartbeat import Heartbeat
from evener.distributed.watchdog.peer_state import Standing, report_on
from evener.distributed.watchdog.stall import Reminder
from evener.errors import EvenerError, RankTimeoutError

_LOOK_SECONDS = 1.0
_GAP_SECONDS = 5.0
_PATIENCE_SECONDS = 3.0
"""While any rank can speak, it shall: it knows more."""

Beats = Mapping[int, Heartbeat | None]
"""Of each rank of this machine whose process runs, by rank; None before its first."""


class Lookout:
    """Ends ranks that have all been silent for as long as each of them would wait for others, and those that stay
    when their work is done.

    Args:
        beats: The last heartbeats.
        pids: Of the ranks' processes.
    """

    def __init__(self, beats: Callable[[], Beats], pids: Callable[[], Mapping[int, int]] = dict) -> None:
        self._beats, self._pids = beats, pids
        self._silent: dict[int, tuple[tuple[int, int], float]] = {}
        self._starts, self._ends, self._reminder = Starts(), Ends(), Reminder()
        self._looked = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evener-lookout", daemon=True)
        self.found: EvenerError | None = None
        """What it has ended them for."""
        self.was_done = False
        """Whether those that it has ended had done their work."""

    def __enter__(self) -> Lookout:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def silent_seconds(self, beats: Beats, now: float) -> float:
        """For how long no rank has given a sign of life; 0 while any is still to come, or has left on its own."""
        if now - self._looked > _GAP_SECONDS:  # this process was stopped: nobody has listened
            self._silent.clear()
        self._looked = now
        if not beats:
            return 0.0
        return min(self._silence(rank, beat, now) for rank, beat in beats.items())

    def _silence(self, rank: int, beat: Heartbeat | None, now: float) -> float:
        if beat is None or beat.ended:
            return 0.0
        last, since = self._silent.get(rank, ((0, 0), now))
        if last != (beat.pid, beat.count):
            self._silent[rank], since = ((beat.pid, beat.count), now), now
        return now - since

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS) and self.found is None:
            beats, now = self._beats(), time.monotonic()
            self._starts.look(self._pids(), beats, now)
            left = [beat for beat in beats.values() if beat is not None and beat.ended]
            stay = self._ends.look(left, now)
            if stay is not None:
                self.was_done = True
                self._end(left, stay)
            else:
                self._look_at_silence(beats, self.silent_seconds(beats, now))

    def _look_at_silence(self, beats: Beats, seconds: float) -> None:
        last = [beat for beat in beats.values() if beat is not None]
        limit = max((beat.limit for beat in last), default=0.0)
        if last and seconds >= limit + _PATIENCE_SECONDS:
            self._end(last, RankTimeoutError(silence_words(last, seconds, f" (timeout {limit:g} s)")))
        else:
            self._reminder.say(seconds, lambda: silence_words(last, seconds))

    def _end(self, beats: Sequence[Heartbeat], why: EvenerError) -> None:
        self.found = why
        for beat in beats:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(beat.pid, signal.SIGKILL)


def silence_words(beats: Sequence[Heartbeat], seconds: float, limit: str = "") -> str:
    """A report on ranks that are all silent."""
    stacks = {beat.rank: stacks_of(beat.pid) for beat in beats}
    return (
        f"no rank of this machine has given a sign of life for {seconds:.0f} s{limit}: they are in native code that "
        "holds Python's lock, or stopped\n" + report_on([Standing(beat.rank, beat) for beat in beats], stacks)
    )
