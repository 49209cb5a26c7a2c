"""Futex: sleeps in the kernel until another process changes a word of shared memory.

A futex (``futex(2)``; Drepper, "Futexes Are Tricky", 2011) is a 32-bit word anywhere in memory. :func:`sleep` makes the
kernel compare the word with the value last seen, and sleep only if they are equal, as one atomic operation.
:func:`wake` ends all such sleeps. So no change between the comparison and the sleep is missed, if every writer of the
word calls ``wake`` afterwards.
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


# Functions of a CDLL release the GIL during the call.
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
    """Returns the address of byte ``offset`` of ``memory`` in this process. It is valid while ``memory`` is kept."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))


def sleep(word: int, seen: int, seconds: float) -> None:
    """Sleeps until a process calls `wake` for the word.

    Also returns at once if the word's value is not ``seen`` any more, after ``seconds``, or on a signal. The caller
    must read the word again to find out.

    Args:
        word: Address of the word, a multiple of 4.
        seen: The value last seen; only the lower 32 bits count.
        seconds: The longest sleep.
    """
    whole = int(seconds)
    limit = _Timespec(whole, int((seconds - whole) * 1e9))
    _syscall(_SYSCALL, word, _WAIT, seen & 0xFFFFFFFF, ctypes.addressof(limit), None, 0)


def wake(word: int) -> None:
    """Wakes all threads, of all processes, that sleep on the word at this address."""
    _syscall(_SYSCALL, word, _WAKE, _ALL, None, None, 0)


def fence() -> None:
    """Memory fence: this thread's earlier stores are visible to all before any of its later loads.

    x86 may execute a load before an earlier store to another address. It does not move either of them past the
    instruction that takes a lock.
    """
    with _fence:
        pass
