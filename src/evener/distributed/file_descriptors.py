"""Whether a process has used up its file descriptors, for which native code has other words.

A socket that cannot be opened is "Cannot resolve 127.0.0.1" in gloo, and a time that ran out in PyTorch's store. So the
launcher makes room before it starts ranks, and refuses to start them where there can be none.
"""

from __future__ import annotations

import errno
import os
import resource

import psutil

from evener.core.os_errors import words
from evener.errors import ConfigurationError

_NEEDED, _NEEDED_EACH = 40, 6
"""Descriptors of a rank, and for each rank of its machine: a connection or two, and files of shared memory."""
_AMPLE = 1024
"""The limit on most machines."""
_SPARE = 8
"""So few are soon used by what opens several at once."""
_reserved: list[int] = []


def make_room(ranks: int) -> None:
    """Raises the limit of this process, which ranks inherit, if it is too low for so many on this machine.

    Raises:
        ConfigurationError: If the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _NEEDED + _NEEDED_EACH * ranks
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigurationError(
            f"a process may have {hard} files open here, and {ranks} ranks need {needed} each: raise the hard limit "
            "(ulimit -Hn, LimitNOFILE of a service), or take fewer processes"
        )
    ample = max(_AMPLE, 2 * needed)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (ample if hard == resource.RLIM_INFINITY else min(hard, ample), hard)
    )


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
