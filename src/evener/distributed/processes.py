"""State and processor time of processes on this machine.

A process id may be reused, so a process is represented by a `psutil.Process`, which holds the id and the start time in
the kernel's ticks. If another process has the same id, the original one counts as gone.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import psutil

State = Literal["running", "stopped", "gone"]
"""State of a process: ``stopped`` by SIGSTOP or a debugger; ``gone`` includes zombies."""

_STATES: dict[str, State] = {
    psutil.STATUS_ZOMBIE: "gone",
    psutil.STATUS_DEAD: "gone",
    psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_TRACING_STOP: "stopped",
}


def find(pid: int) -> psutil.Process | None:
    """Returns the process that has this id now. Returns None if there is none."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def state_of(process: psutil.Process | None) -> State:
    """Returns the state of a process that `find` returned; ``gone`` for None."""
    try:
        if process is None or not process.is_running():
            return "gone"
        return _STATES.get(process.status(), "running")
    except psutil.NoSuchProcess:  # it ended between the two calls
        return "gone"


def is_alive(pid: int | None) -> bool:
    """Returns True if a process with this id exists and has not ended. Returns False for None."""
    return pid is not None and state_of(find(pid)) != "gone"


def cpu_seconds(pid: int) -> float:
    """Returns the processor time of a process and its running descendants, in seconds; 0 if it is gone."""
    process = find(pid)
    return 0.0 if process is None else _used_by(process) + children_cpu_seconds(process)


def children_cpu_seconds(process: psutil.Process) -> float:
    """Returns the processor time of a process's running descendants, in seconds."""
    with suppress(psutil.Error):
        return sum(map(_used_by, process.children(recursive=True)))
    return 0.0


def _used_by(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0
