"""Detects that the launcher of a rank is stopped, or that the store of the run does not answer.

A rank does not outlive its launcher (`signals.die_with`). But a launcher that is stopped, by a debugger or by Ctrl-Z,
answers no requests and reports nothing. Then the ranks end by themselves and say why.
"""

from __future__ import annotations

import os
import time

from evener.distributed.processes import find, state_of

LAUNCHER_PID = "EVENER__LAUNCHER_PID"
"""Environment variable with the process id of the launcher, which a rank does not outlive."""


class StoreHealth:
    """Tracks whether the store answers (the watchdog reports it) and whether this process's launcher is stopped."""

    def __init__(self) -> None:
        pid = os.environ.get(LAUNCHER_PID)
        self._pid = pid
        self._launcher = None if pid is None else find(int(pid))
        self._stopped_since: float | None = None
        self._silent_since: float | None = None

    def heard(self) -> None:
        """Records that the store has answered."""
        self._silent_since = None

    def silent(self) -> None:
        """Records that the store has not answered."""
        self._silent_since = self._silent_since or time.monotonic()

    def is_lost_for(self, seconds: float) -> bool:
        """Returns True if the store has not answered for at least ``seconds``."""
        return self._silent_since is not None and time.monotonic() - self._silent_since >= seconds

    def stopped_seconds(self) -> float:
        """Returns for how long the launcher has been stopped; 0 if it runs or there is none."""
        if self._launcher is None or state_of(self._launcher) != "stopped":
            self._stopped_since = None
            return 0.0
        self._stopped_since = self._stopped_since or time.monotonic()
        return time.monotonic() - self._stopped_since

    @property
    def description(self) -> str:
        """Message that says what is wrong with the launcher or the store."""
        if self.stopped_seconds():
            return f"its launcher (pid {self._pid}) is stopped (SIGSTOP, or a debugger)"
        now = time.monotonic()
        return (
            f"the store of the run has not answered for {now - (self._silent_since or now):.0f} s: the launcher of the "
            "first machine, or rank 0, has ended, is stopped, or cannot be reached"
        )
