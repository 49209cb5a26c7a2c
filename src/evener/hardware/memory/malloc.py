"""Freed memory that the C library keeps: the CPU's counterpart of a GPU allocator's cache.

When a process frees a tensor, glibc often keeps the memory for the next one (``mallinfo2``, man mallinfo; glibc 2.33).
Reading the amount takes 1 microsecond, or 70 after a thousand small tensors were allocated and freed.

By default glibc maps a block of more than 128 KB anew whenever it is asked for one, and returns the top of its heap to
the system. The system then clears each page at its first use, which took a seventh of a step of a small convolutional
network. So in a session it keeps what the process has freed (man mallopt), at most as much as it had in use.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK, _MOST_AT_TOP = 1 << 30, (1 << 31) - 1
_USUAL_BLOCK, _USUAL_AT_TOP = 32 << 20, 64 << 20
"""The thresholds to which glibc's own adjustment leads at most, in bytes."""
_CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _reader() -> Callable[[], int]:
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # another C library, or an older one
        return lambda: 0
    mallinfo2.restype = _Mallinfo2
    return lambda: int(mallinfo2().fordblks)


kept_nbytes = _reader()
"""Returns the number of freed bytes that the C library keeps; 0 if it does not report them, or if another allocator
replaces it."""


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
