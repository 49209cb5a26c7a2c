"""What one rank knows of another: its last heartbeat, and how long ago the last new one came.

Silence is measured on the reader's own clock, because the clocks of two machines differ; on the same machine
the process itself is looked at, so that a killed or stopped rank is known at once.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Iterable

from evener.runtime.heartbeat import Heartbeat, process_state

_SILENT_BEATS = 3


class Standing:
    """Where one rank stands, as seen from this one."""

    def __init__(self, rank: int, beat: Heartbeat | None = None) -> None:
        self.rank = rank
        self.beat = beat
        self._since = time.monotonic()

    def update(self, beat: Heartbeat) -> None:
        if self.beat is None or beat.count != self.beat.count:
            self.beat, self._since = beat, time.monotonic()

    @property
    def silent_seconds(self) -> float:
        observed = time.monotonic() - self._since
        if self.beat is not None and self.beat.host == socket.gethostname():
            return max(observed, time.time() - self.beat.time)
        return observed

    @property
    def state(self) -> str:
        """``unknown`` (never heard of), ``ended``, ``gone``, ``stopped`` or ``running``, as far as can be
        told.
        """
        if self.beat is None:
            return "unknown"
        if self.beat.ended:
            return "ended"
        local = self.beat.host == socket.gethostname()
        return process_state(self.beat.pid) if local else "running"

    def is_lost(self, interval_seconds: float) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.state != "running" or self.silent_seconds > _SILENT_BEATS * interval_seconds

    def is_missing(self, here: Heartbeat, interval_seconds: float) -> bool:
        """Whether it is not where the rank of heartbeat ``here`` waits for it."""
        beat = self.beat
        if beat is None or self.is_lost(interval_seconds):
            return True
        return not beat.waits or (beat.phase, beat.step) != (here.phase, here.step)

    def describe(self) -> str:
        if self.beat is None:
            return f"rank {self.rank}: has given no sign of life yet"
        return f"{self.beat.who}: {self._doing(self.beat)}"

    def _doing(self, beat: Heartbeat) -> str:
        last = f"last seen in {beat.place}"
        if self.state == "ended":
            return "has ended on its own"
        if self.state == "gone":
            return f"is gone; {last}"
        if self.state == "stopped":
            silence = f"no sign of life for {self.silent_seconds:.0f} s"
            return f"is stopped (SIGSTOP, or a debugger), {silence}; {last}"
        if self.silent_seconds > _SILENT_BEATS:
            return f"no sign of life for {self.silent_seconds:.0f} s; {last}"
        verb = "waits in" if beat.waits else "is in"
        return f"{verb} {beat.place}, for {beat.seconds:.0f} s"

    @property
    def lateness(self) -> tuple[bool, bool, int]:
        """Sorts the ranks that others wait for first: the lost, then those at work, then those that wait."""
        waits = self.beat is not None and self.beat.waits
        return (not self.is_lost(1.0), waits, self.rank)


def must_speak(
    here: Heartbeat, others: Collection[Standing], timeout_seconds: float, interval_seconds: float
) -> bool:
    """Whether the rank of heartbeat ``here`` must end the run, because its wait is hopeless.

    It is when this rank has waited for the timeout, and another rank is elsewhere or silent, or all have been in the
    same place for as long. The lowest of the ranks that wait speaks; the others give it a few heartbeats to do so.
    """
    if not here.waits or here.seconds < timeout_seconds:
        return False
    missing = [other for other in others if other.is_missing(here, interval_seconds)]
    patience = timeout_seconds - 3 * interval_seconds
    all_stuck = all(other.beat is not None and other.beat.seconds >= patience for other in others)
    if not missing and not all_stuck:
        return False
    lower = any(other.rank < here.rank for other in others if other not in missing)
    return not lower or here.seconds > timeout_seconds + 4 * interval_seconds


def report_on(standings: Iterable[Standing]) -> str:
    """One line for every rank, the late ones first."""
    return "\n".join(f"  {s.describe()}" for s in sorted(standings, key=lambda s: s.lateness))
