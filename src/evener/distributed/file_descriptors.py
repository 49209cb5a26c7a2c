"""Limits of open files: raises them for ranks, and detects when a process has used up its file descriptors.

Native code reports that badly: a socket that cannot be opened is "Cannot resolve 127.0.0.1" in gloo, and a timeout in
PyTorch's store. So the launcher raises the limit before it starts ranks, and does not start them if it cannot.
"""

from __future__ import annotations

import errno
import os
import resource

import psutil

from evener.core.os_errors import os_error_message
from evener.errors import ConfigurationError

_NEEDED, _NEEDED_EACH = 40, 6
"""File descriptors that a rank needs, and how many more for each rank of its machine (connections, shared memory)."""
_AMPLE = 1024
"""Usual limit on most machines."""
_SPARE = 8
"""Number of reserved descriptors. With at most twice as many left, descriptors count as used up."""
_reserved: list[int] = []


def make_room(ranks: int) -> None:
    """Raises this process's limit of open files if it is too low for ``ranks`` ranks. Ranks inherit the limit.

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
    """Reserves some descriptors, so that a failure can be reported when all others are used."""
    _reserved.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(_SPARE))


def release() -> None:
    """Closes the descriptors that `reserve` holds."""
    while _reserved:
        os.close(_reserved.pop())


def shortage_message(pid: int | None = None) -> str:
    """Returns text to append to an error if a process (None: this one) has used up its descriptors; else empty.

    Example: ``; 256 of the 256 files that process 12 may have open are open: raise the limit ...``
    """
    pid = os.getpid() if pid is None else pid
    try:
        process = psutil.Process(pid)
        limit = process.rlimit(psutil.RLIMIT_NOFILE)[0]
        used = process.num_fds()
    except OSError as error:
        is_own = pid == os.getpid() and error.errno in (errno.EMFILE, errno.ENFILE)
        return f"; process {pid}: {os_error_message(error)}" if is_own else ""
    except psutil.Error:
        return ""
    if limit == psutil.RLIM_INFINITY or used + 2 * _SPARE < limit:
        return ""
    return (
        f"; {used} of the {limit} files that process {pid} may have open are open: raise the limit (ulimit -n), or "
        "close what is not needed"
    )
