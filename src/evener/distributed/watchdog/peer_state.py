"""State of another rank: its last heartbeat, and how long ago the last new one arrived.

Silence is measured with the reader's clock, because the clocks of two machines differ. On the same machine the process
itself is examined, so that a killed or stopped rank is noticed at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping

import psutil

from evener.distributed.file_descriptors import shortage_message
from evener.distributed.hosts import host_token
from evener.distributed.processes import find, state_of
from evener.distributed.watchdog.heartbeat import Heartbeat
from evener.distributed.watchdog.store_health import LAUNCHER_PID


class PeerState:
    """State of one rank, as seen from this one."""

    def __init__(self, rank: int, beat: Heartbeat | None = None) -> None:
        self.rank = rank
        self.beat: Heartbeat | None = None
        self._since = time.monotonic()
        self._process: psutil.Process | None = None
        self._apart_from = ""
        self._apart_since: float | None = None
        if beat is not None:
            self.update(beat)

    def update(self, beat: Heartbeat) -> None:
        """Records a heartbeat, unless it is the one that is known already."""
        before = self.beat
        if before is None or (beat.rank, beat.count) != (before.rank, before.count):
            self.beat, self._since = beat, time.monotonic()
            if self._is_local(beat) and (self._process is None or self._process.pid != beat.pid):
                self._process = find(beat.pid)

    @staticmethod
    def _is_local(beat: Heartbeat) -> bool:
        """Returns True if the sender's processes are visible here. Equal host names would not prove that."""
        return beat.token == host_token()

    @property
    def silent_seconds(self) -> float:
        observed = time.monotonic() - self._since
        if self.beat is not None and self._is_local(self.beat):
            return max(observed, time.monotonic() - self.beat.time)
        return observed

    @property
    def is_silent(self) -> bool:
        """True if several heartbeats of the rank are missing."""
        return self.beat is None or self.silent_seconds > self.beat.patience_seconds

    @property
    def state(self) -> str:
        """``unknown`` (no heartbeat yet), ``ended``, ``gone``, ``stopped`` or ``running``. A rank of another host that
        has not ended counts as running."""
        if self.beat is None:
            return "unknown"
        if self.beat.ended:
            return "ended"
        return state_of(self._process) if self._is_local(self.beat) else "running"

    @property
    def is_lost(self) -> bool:
        """True if the rank does not run, or is silent."""
        return self.state != "running" or self.is_silent

    def is_missing(self, here: Heartbeat) -> bool:
        """Returns True if the rank is not where the rank of heartbeat ``here`` waits for it."""
        beat = self.beat
        if beat is None or self.is_lost:
            return True
        if here.together or beat.together:
            return beat.together != here.together
        return not beat.waits or (beat.phase, beat.step) != (here.phase, here.step)

    def waits_for(self, seconds: float, news_seconds: float) -> bool:
        """Returns True if the rank has waited for ``seconds``, by a heartbeat not older than ``news_seconds``."""
        beat = self.beat
        waits = beat is not None and beat.waits and beat.seconds >= seconds
        return waits and self.state == "running" and self.silent_seconds <= news_seconds

    def is_still(self, seconds: float) -> bool:
        """Returns True if the rank has made no progress for ``seconds``, or has ended."""
        if self.beat is None or self.state == "stopped":
            return self.silent_seconds >= seconds
        idle = self.beat.idle if not self.beat.together else 0.0
        return self.state in ("ended", "gone") or max(idle, self.silent_seconds) >= seconds

    def compare(self, here: Heartbeat) -> None:
        """Updates `apart_seconds`: checks if the rank is missing from the joint operation of the rank of ``here``."""
        if not here.together or not self.is_missing(here):
            self._apart_since = None
        elif self._apart_since is None or self._apart_from != here.together:
            self._apart_since = time.monotonic()
        self._apart_from = here.together

    def lose_sight(self) -> None:
        """Ends `apart_seconds`, because this rank compares no more: nobody would notice if the other came back."""
        self._apart_since = None

    @property
    def apart_seconds(self) -> float:
        """For how long every `compare` has found the rank missing, without a pause; 0 if the last did not."""
        return 0.0 if self._apart_since is None else time.monotonic() - self._apart_since

    def describe(self) -> str:
        if self.beat is None:
            return f"rank {self.rank}: has given no sign of life yet{_is_it_started()}"
        done = f", after {self.beat.progress}" if self.beat.progress else ""
        short = shortage_message(self.beat.pid) if self._is_local(self.beat) else ""
        return f"{self.beat.who}: {self._doing(self.beat)}{done}{short}"

    @property
    def departure_message(self) -> str:
        """Description of a rank that has ended or is gone: ``rank 1 has left after step 3 of 16 with status 0``."""
        beat = self.beat
        assert beat is not None
        done = f" after {beat.progress}" if beat.progress else ""
        if self.state == "gone":
            return f"rank {beat.rank} is gone{done}"
        return f"rank {beat.rank} has left{done}{beat.exit_status_text}"

    def _doing(self, beat: Heartbeat) -> str:
        last = f"last seen in {beat.place}"
        if self.state == "ended":
            return f"has left on its own{beat.exit_status_text}"
        if self.state == "gone":
            return f"is gone; {last}"
        if self.state == "stopped":
            silence = f"no sign of life for {self.silent_seconds:.0f} s"
            return f"is stopped (SIGSTOP, or a debugger), {silence}; {last}"
        if self.is_silent:
            return f"no sign of life for {self.silent_seconds:.0f} s; {last}"
        verb = "waits in" if beat.waits else "is in"
        return f"{verb} {beat.place}, for {beat.seconds:.0f} s"

    @property
    def lateness(self) -> tuple[bool, bool, bool, int]:
        """Sort key: lost ranks first, then missing ranks, then those that work, then those that wait."""
        waits = self.beat is not None and self.beat.waits
        return (not self.is_lost, self._apart_since is None, waits, self.rank)


def _is_it_started() -> str:
    """Asks if the launcher starts as many ranks as its variable says; empty if Evener launches them itself."""
    count = os.environ.get("WORLD_SIZE")
    if count is None or LAUNCHER_PID in os.environ:
        return ""
    return f"; is it started? WORLD_SIZE is {count}, and each of these ranks must be"


def should_look(here: Heartbeat, looker: PeerState) -> bool:
    """Returns True if the rank of heartbeat ``here`` must check all others from now on, in place of ``looker``.

    If every waiting rank checked every other, a hang of N ranks would make N squared requests a second. So only one
    does: the rank that has waited longest, because it times out first, and the lowest of several. Another rank takes
    over when it falls silent, which it also does when its wait is over.
    """
    beat = looker.beat
    if beat is None or beat.rank == here.rank or looker.is_lost:
        return True
    ahead = here.stuck_seconds - beat.stuck_seconds
    # Heartbeats are up to an interval old, so a small difference counts as equal. Joint operations have no timeout.
    if not here.together and not beat.together and abs(ahead) > here.patience_seconds:
        return ahead > 0
    return here.rank < beat.rank


def report_on(standings: Iterable[PeerState], stacks: Mapping[int, str] | None = None) -> str:
    """Returns one line for every rank, late ranks first, each followed by its entry in ``stacks``, if any."""
    found = stacks or {}
    lines = []
    for standing in sorted(standings, key=lambda s: s.lateness):
        lines.append(f"  {standing.describe()}")
        lines += [found[standing.rank]] if found.get(standing.rank) else []
    return "\n".join(lines)


def late_rank(others: Iterable[PeerState]) -> int | None:
    """Returns the rank that the others wait for: one that is lost, missing or at work. None if all wait."""
    latest = min(others, key=lambda standing: standing.lateness, default=None)
    return None if latest is None or latest.lateness[:3] == (True, True, True) else latest.rank
