"""Whether a process of this machine still lives, asked of the kernel.

A process id may be used again, so a process is held as a `psutil.Process`, which is the id together with the time of
birth in the kernel's own ticks: a stranger under the same id counts as the end of the one that was held.
"""

from __future__ import annotations

from contextlib import suppress
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


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has had, with all that it has started and that still runs; 0 if it is gone."""
    process = find(pid)
    return 0.0 if process is None else _used_by(process) + children_cpu_seconds(process)


def children_cpu_seconds(process: psutil.Process) -> float:
    """Processor time of all that a process has started and that still runs."""
    with suppress(psutil.Error):
        return sum(map(_used_by, process.children(recursive=True)))
    return 0.0


def _used_by(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0
