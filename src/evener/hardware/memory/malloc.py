"""What the C library keeps of memory that was freed: on a CPU the counterpart of a GPU's cache.

A process that frees a tensor often does not become smaller: glibc keeps the memory for the next one (``mallinfo2``,
man mallinfo; glibc 2.33). Reading it
takes a microsecond, and 70 where a thousand small tensors have come and gone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable


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
"""Bytes that were freed and are kept; 0 where the C library does not tell, or another allocator stands before it."""
