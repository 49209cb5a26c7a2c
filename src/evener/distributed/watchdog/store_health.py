"""The launcher and the store in it, as a rank sees them: who keeps a run together may itself be stopped, or gone.

A rank does not outlive a launcher that dies (`interrupt.die_with`). One that is stopped, by a debugger or by Ctrl-Z,
says nothing more and answers nothing: the ranks end by themselves then, and say why.
"""

from __future__ import annotations

import os
import time

from evener.distributed.processes import find, state_of

LAUNCHER_PID = "EVENER__LAUNCHER_PID"
"""Environment variable with the process that a rank does not outlive."""


class Keeper:
    """Told by the watchdog whether the store answers; looks at the launcher of this process if there is one."""

    def __init__(self) -> None:
        pid = os.environ.get(LAUNCHER_PID)
        self._pid = pid
        self._launcher = None if pid is None else find(int(pid))
        self._stopped_since: float | None = None
        self._silent_since: float | None = None

    def heard(self) -> None:
        """The store has answered."""
        self._silent_since = None

    def silent(self) -> None:
        """The store has not answered."""
        self._silent_since = self._silent_since or time.monotonic()

    def is_lost_for(self, seconds: float) -> bool:
        """Whether the store has not answered for so long."""
        return self._silent_since is not None and time.monotonic() - self._silent_since >= seconds

    def stopped_seconds(self) -> float:
        """For how long the launcher of this process has been stopped."""
        if self._launcher is None or state_of(self._launcher) != "stopped":
            self._stopped_since = None
            return 0.0
        self._stopped_since = self._stopped_since or time.monotonic()
        return time.monotonic() - self._stopped_since

    @property
    def words(self) -> str:
        """What has become of them."""
        if self.stopped_seconds():
            return f"its launcher (pid {self._pid}) is stopped (SIGSTOP, or a debugger)"
        now = time.monotonic()
        return (
            f"the store of the run has not answered for {now - (self._silent_since or now):.0f} s: the launcher of the "
            "first machine, or rank 0, has ended, is stopped, or cannot be reached"
        )
