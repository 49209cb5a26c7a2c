"""Whether a process of this machine still lives, asked of the kernel.

A process id may be used again, so a process is held as a `psutil.Process`, which is the id together with the time of
birth in the kernel's own ticks: a stranger under the same id counts as the end of the one that was held.
"""

from __future__ import annotations

from typing import Literal

import psutil

State = Literal["running", "stopped", "gone"]
"""``stopped`` by SIGSTOP or a debugger; ``gone`` also where nobody has reaped it yet."""

_STATES: dict[str, State] = {
    psutil.STATUS_ZOMBIE: "gone",
    psutil.STATUS_DEAD: "gone",
    psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_TRACING_STOP: "stopped",
}


def find(pid: int) -> psutil.Process | None:
    """The process that has this id now; None if there is none."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def state_of(process: psutil.Process | None) -> State:
    """The state of a process that `find` found, at some time or never."""
    try:
        if process is None or not process.is_running():
            return "gone"
        return _STATES.get(process.status(), "running")
    except psutil.NoSuchProcess:  # it ended between the two questions
        return "gone"


def is_alive(pid: int | None) -> bool:
    """Whether a process has this id now, and has not ended; not of None."""
    return pid is not None and state_of(find(pid)) != "gone"
