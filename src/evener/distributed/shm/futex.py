"""Sleep in the kernel until another process changes a word of memory that both share.

A futex (``futex(2)``; Drepper, "Futexes Are Tricky", 2011) is a 32-bit word anywhere in memory. :func:`sleep` lets the
kernel compare it with what was last seen there, and sleeps only if it is still that, in one step; :func:`wake` ends all
such sleeps. So no change between the look and the sleep is missed, if whoever changes the word calls ``wake`` after it.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

_SYSCALL = 202  # on x86_64, see arch/x86/entry/syscalls/syscall_64.tbl of Linux
_WAIT, _WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG: the sleepers are other processes
_ALL = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# Loaded thus, calls let other threads of this process run meanwhile.
_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
)
_syscall.restype = ctypes.c_long
_fence = threading.Lock()


def address(memory: mmap.mmap, offset: int) -> int:
    """Where the byte ``offset`` of ``memory`` lies in this process, for as long as ``memory`` is kept."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))


def sleep(word: int, seen: int, seconds: float) -> None:
    """Returns when somebody wakes the sleepers of the word at this address, at once if it is not ``seen`` any more,
    after ``seconds``, or for a signal; only another look at the word tells which.

    Args:
        word: Its address, a multiple of 4.
        seen: What it held, of which the lower 32 bits count.
        seconds: The longest sleep.
    """
    whole = int(seconds)
    limit = _Timespec(whole, int((seconds - whole) * 1e9))
    _syscall(_SYSCALL, word, _WAIT, seen & 0xFFFFFFFF, ctypes.addressof(limit), None, 0)


def wake(word: int) -> None:
    """Ends the sleep of all who sleep on the word at this address, in whatever process."""
    _syscall(_SYSCALL, word, _WAKE, _ALL, None, None, 0)


def fence() -> None:
    """What this thread stored before is seen by all before it loads anything after.

    x86 lets a load pass an earlier store to another place. A lock is taken by an instruction that it lets nothing pass.
    """
    with _fence:
        pass
