"""The launcher's watchdog over its ranks, for hangs in which no rank can report.

A call in native code that holds the GIL silences the watchdog of its rank. As long as another rank waits, that one
reports the silent rank. If all ranks of this machine are silent or stopped, only the launcher can report. It also
watches ranks that have no watchdog yet (:mod:`evener.distributed.launch.start_watch`) or have done their work
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
from evener.distributed.watchdog.peer_state import PeerState, report_on
from evener.distributed.watchdog.stall import Reminder
from evener.errors import EvenerError, RankTimeoutError

_LOOK_SECONDS = 1.0
_GAP_SECONDS = 5.0
_PATIENCE_SECONDS = 3.0
"""The launcher waits this much longer than the ranks' timeout, because a rank's own report says more."""

Beats = Mapping[int, Heartbeat | None]
"""Last heartbeats of this machine's running ranks, by rank; None before the first heartbeat of a rank."""


class LauncherWatchdog:
    """Kills the ranks of this machine if all were silent for their timeout, or if they do not end after their work.

    Args:
        beats: Returns the last heartbeats.
        pids: Returns the process ids of the ranks, by rank.
    """

    def __init__(self, beats: Callable[[], Beats], pids: Callable[[], Mapping[int, int]] = dict) -> None:
        self._beats, self._pids = beats, pids
        self._silent: dict[int, tuple[tuple[int, int], float]] = {}
        self._starts, self._ends, self._reminder = Starts(), Ends(), Reminder()
        self._looked = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evener-lookout", daemon=True)
        self.found: EvenerError | None = None
        """The error for which ranks were killed; None if none were."""
        self.was_done = False
        """True if the killed ranks had done their work."""

    def __enter__(self) -> LauncherWatchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def silent_seconds(self, beats: Beats, now: float) -> float:
        """Returns for how long no rank has sent a heartbeat; 0 if a rank has not sent its first, or has left."""
        if now - self._looked > _GAP_SECONDS:  # this process was stopped, and has read no heartbeats
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
            self._starts.report_missing(self._pids(), beats, now)
            left = [beat for beat in beats.values() if beat is not None and beat.ended]
            stay = self._ends.reason_to_end(left, now)
            if stay is not None:
                self.was_done = True
                self._end(left, stay)
            else:
                self._look_at_silence(beats, self.silent_seconds(beats, now))

    def _look_at_silence(self, beats: Beats, seconds: float) -> None:
        last = [beat for beat in beats.values() if beat is not None]
        limit = max((beat.limit for beat in last), default=0.0)
        if last and seconds >= limit + _PATIENCE_SECONDS:
            self._end(last, RankTimeoutError(silence_message(last, seconds, f" (timeout {limit:g} s)")))
        else:
            self._reminder.say(seconds, lambda: silence_message(last, seconds))

    def _end(self, beats: Sequence[Heartbeat], why: EvenerError) -> None:
        self.found = why
        for beat in beats:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(beat.pid, signal.SIGKILL)


def silence_message(beats: Sequence[Heartbeat], seconds: float, limit: str = "") -> str:
    """Returns the report on ranks that are all silent, with their stacks."""
    stacks = {beat.rank: stacks_of(beat.pid) for beat in beats}
    return (
        f"no rank of this machine has given a sign of life for {seconds:.0f} s{limit}: they are in native code that "
        "holds Python's lock, or stopped\n"
        + report_on([PeerState(beat.rank, beat) for beat in beats], stacks)
    )
