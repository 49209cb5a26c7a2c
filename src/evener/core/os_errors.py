"""Formats operating system errors in one line, with a remedy.

If the machine lacks something (disk space, file descriptors, memory, permission), the ``OSError`` states the cause. A
traceback would not help the user.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from evener.errors import StorageError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers that mean that no more data can be written: the disk, the quota or the file is full."""
CLOSED = frozenset({errno.EPIPE, errno.ESHUTDOWN, errno.EIO, errno.EBADF})
"""Error numbers that mean that nobody reads a stream any more. A closed terminal reports EIO."""
_CURES = {
    errno.ENOSPC: "make room on the device, or write elsewhere",
    errno.EDQUOT: "make room within your quota, or write elsewhere",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or write elsewhere",
    errno.EROFS: "write elsewhere, as with --run-dir",
    errno.EACCES: "change the permissions, or write elsewhere, as with --run-dir",
    errno.EPERM: "change the permissions, or write elsewhere, as with --run-dir",
    errno.EMFILE: "raise the limit on open files (ulimit -n), or use fewer workers",
    errno.ENFILE: "close other programs, or raise fs.file-max",
    errno.ENOMEM: "use fewer processes or workers, or smaller batches",
    errno.EAGAIN: "raise the limit on processes (ulimit -u), or use fewer processes or workers",
}
_SHORTAGES = FULL | {errno.EROFS, errno.EACCES, errno.EMFILE, errno.ENFILE}


def is_shortage(error: BaseException) -> bool:
    """Returns True if the machine lacks or forbids something, so that a traceback would not help."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def os_error_behind(error: BaseException) -> OSError | None:
    """Returns the operating system's error that led to this one, which hides it, or None. PyTorch's writer of files
    fails once more when it closes a file on a full disk."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause


def os_error_message(error: OSError) -> str:
    """Returns the error, the files and a remedy in one line."""
    places = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    if not places and error.errno == errno.ENOENT and _is_nowhere():
        return "the current directory was removed: change into one that exists, and start again"
    said = f"{error.strerror or error}" + (f": {places}" if places else "")
    cure = _CURES.get(error.errno or 0, "")
    return " ".join((f"{said}; {cure}" if cure else said).split())


def _is_nowhere() -> bool:
    """Returns True if the working directory of this process was removed. Its error names no file."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Converts any OSError in the block to a `StorageError` whose message begins with ``doing``."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{doing}: {os_error_message(error)}") from error
