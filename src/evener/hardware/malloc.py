"""Lets the GNU C library keep the memory of freed tensors, so that the next step need not have it mapped again.

By default glibc maps a block of more than 128 KB anew whenever it is asked for one, and returns the top of its heap to
the system. The system then clears each page at its first use, which took a seventh of a step of a small convolutional
network. What is kept is what the process had in use at most; PyTorch's own allocator for GPUs keeps memory in the same
way. The parameters are described in ``man mallopt``.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK, _MOST_AT_TOP = 1 << 30, (1 << 31) - 1
_USUAL_BLOCK, _USUAL_AT_TOP = 32 << 20, 64 << 20
"""The thresholds to which glibc's own adjustment leads at most, in bytes."""
_CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def _is_left_alone() -> bool:
    """Returns True with another C library or allocator, or if the user has chosen glibc's parameters."""
    preloaded, tunables = os.environ.get("LD_PRELOAD", ""), os.environ.get("GLIBC_TUNABLES", "")
    return (
        platform.libc_ver()[0] != "glibc"
        or "malloc" in preloaded
        or "glibc.malloc" in tunables
        or any(name in os.environ for name in _CHOSEN_BY_USER)
    )


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Context in which the process keeps freed memory. Afterwards what is free is returned to the system."""
    if _is_left_alone():
        yield
        return
    library = ctypes.CDLL(None)
    _set_thresholds(library, _LARGEST_BLOCK, _MOST_AT_TOP)
    try:
        yield
    finally:
        _set_thresholds(library, _USUAL_BLOCK, _USUAL_AT_TOP)
        library.malloc_trim(0)


def _set_thresholds(library: ctypes.CDLL, block: int, at_top: int) -> None:
    library.mallopt(_MMAP_THRESHOLD, block)
    library.mallopt(_TRIM_THRESHOLD, at_top)
