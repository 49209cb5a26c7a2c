"""The time that the threads of this process had a core, and that for which they waited for one.

Linux counts both for each thread, in nanoseconds. A thread that could run and has no core shows that the machine has
more to do than cores: too many threads, or other programs.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from evener.hardware.procfs import text_of

_TASKS = Path("/proc/self/task")


class CpuTime(NamedTuple):
    """Seconds of all threads of a process. Those of a thread that has ended are no longer in it."""

    busy: float
    """Seconds on a core."""
    queued: float
    """Seconds in which a thread could have run and had no core."""


def cpu_time(tasks: Path = _TASKS) -> CpuTime:
    """Returns the times of this process so far; zeros where the system does not count them."""
    texts = [text_of(path / "schedstat").split() for path in tasks.glob("[0-9]*")]
    known = [(int(text[0]), int(text[1])) for text in texts if len(text) == 3]
    return CpuTime(sum(busy for busy, _ in known) / 1e9, sum(queued for _, queued in known) / 1e9)
