"""Reads the CPU and memory limits of a container from Linux control groups, versions 1 and 2.

A limit may be set on the process's own group or on any group above it; the lowest applies. In a container the path in
``/proc/self/cgroup`` is often that of the host and does not exist; the mount's root is then the container's group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evener.hardware.procfs import text_of

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
_UNLIMITED_NBYTES = 1 << 60
"""Limits from this value on mean unlimited: version 1 reports the largest number of whole pages."""


def cpu_quota(root: Path = ROOT, own: Path = OWN) -> float | None:
    """Returns the limit of CPU time, in cores. Returns None if it is not limited."""
    found = [_of_max(text_of(group / "cpu.max")) for group in _groups("", root, own)]
    found += [
        _of_quota(text_of(group / "cpu.cfs_quota_us"), text_of(group / "cpu.cfs_period_us"))
        for group in _groups("cpu", root, own)
    ]
    return min((quota for quota in found if quota is not None), default=None)


def memory_limit(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Returns the memory limit in bytes. Returns None if memory is not limited."""
    found = [text_of(group / "memory.max") for group in _groups("", root, own)]
    found += [text_of(group / "memory.limit_in_bytes") for group in _groups("memory", root, own)]
    limits = [int(text) for text in found if text.isdecimal()]
    return min((limit for limit in limits if limit < _UNLIMITED_NBYTES), default=None)


def _groups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Iterates over the directories of this process's group and of the groups above it.

    ``controller`` is empty for version 2, which has one tree for all controllers.
    """
    top = root / controller
    inner = top / _place(controller, text_of(own)).lstrip("/")
    yield top
    while inner != top and top in inner.parents:
        yield inner
        inner = inner.parent


def _place(controller: str, text: str) -> str:
    """Parses the group's path from lines such as ``4:memory:/jobs/1``, or ``0::/jobs/1`` for version 2."""
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        names, _, place = rest.partition(":")
        if controller in names.split(",") and ".." not in place:
            return place
    return ""


def _of_max(text: str) -> float | None:
    """Parses a quota in cores: ``150000 100000`` is 1.5. Returns None for ``max 100000``, which is no limit."""
    quota, _, period = text.partition(" ")
    return _of_quota(quota, period)


def _of_quota(quota: str, period: str) -> float | None:
    if not (quota.isdecimal() and period.isdecimal()) or int(period) == 0:
        return None
    return int(quota) / int(period)
