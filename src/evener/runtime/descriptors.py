"""Whether a process has used up its file descriptors, for which native code has other words.

A socket that cannot be opened is "Cannot resolve 127.0.0.1" in gloo, and a time that ran out in PyTorch's store.
"""

from __future__ import annotations

import errno
import os

import psutil

from evener.system import words

_SPARE = 8
"""So few are soon used by what opens several at once."""
_reserved: list[int] = []


def reserve() -> None:
    """Holds some, so that a failure can be told when all others are used."""
    _reserved.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(_SPARE))


def release() -> None:
    """Gives back what `reserve` holds."""
    while _reserved:
        os.close(_reserved.pop())


def shortage_words(pid: int | None = None) -> str:
    """Behind an error of a process, or of this one: that its descriptors are used up; else empty.

    ``; 256 of the 256 files that process 12 may have open are open: raise the limit ...``
    """
    pid = os.getpid() if pid is None else pid
    try:
        process = psutil.Process(pid)
        limit = process.rlimit(psutil.RLIMIT_NOFILE)[0]
        used = process.num_fds()
    except OSError as error:
        is_own = pid == os.getpid() and error.errno in (errno.EMFILE, errno.ENFILE)
        return f"; process {pid}: {words(error)}" if is_own else ""
    except psutil.Error:
        return ""
    if limit == psutil.RLIM_INFINITY or used + 2 * _SPARE < limit:
        return ""
    return (
        f"; {used} of the {limit} files that process {pid} may have open are open: raise the limit (ulimit -n), or "
        "close what is not needed"
    )
