"""What a container may use of its machine, by Linux's control groups of both versions.

A limit may be set on the process's own group or on any above it, and the least counts. In a container the path that
``/proc/self/cgroup`` names is often the host's and not to be found; the root of the mount is then the container's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evener.hardware.procfs import text_of

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
_UNLIMITED_NBYTES = 1 << 60
"""Version 1 has no word for it, and says the largest number of whole pages."""


def cpu_quota(root: Path = ROOT, own: Path = OWN) -> float | None:
    """Cores' worth of time; None if it is not limited."""
    found = [_of_max(text_of(group / "cpu.max")) for group in _groups("", root, own)]
    found += [
        _of_quota(text_of(group / "cpu.cfs_quota_us"), text_of(group / "cpu.cfs_period_us"))
        for group in _groups("cpu", root, own)
    ]
    return min((quota for quota in found if quota is not None), default=None)


def memory_limit(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Bytes; None if they are not limited."""
    found = [text_of(group / "memory.max") for group in _groups("", root, own)]
    found += [text_of(group / "memory.limit_in_bytes") for group in _groups("memory", root, own)]
    limits = [int(text) for text in found if text.isdecimal()]
    return min((limit for limit in limits if limit < _UNLIMITED_NBYTES), default=None)


def _groups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Directories of the group of this process and of those above it; version 2 has one tree for all controllers."""
    top = root / controller
    inner = top / _place(controller, text_of(own)).lstrip("/")
    yield top
    while inner != top and top in inner.parents:
        yield inner
        inner = inner.parent


def _place(controller: str, text: str) -> str:
    """From lines such as ``4:memory:/jobs/1``, and ``0::/jobs/1`` of version 2."""
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        names, _, place = rest.partition(":")
        if controller in names.split(",") and ".." not in place:
            return place
    return ""


def _of_max(text: str) -> float | None:
    """``150000 100000`` is one and a half; ``max 100000`` is no limit."""
    quota, _, period = text.partition(" ")
    return _of_quota(quota, period)


def _of_quota(quota: str, period: str) -> float | None:
    if not (quota.isdecimal() and period.isdecimal()) or int(period) == 0:
        return None
    return int(quota) / int(period)
