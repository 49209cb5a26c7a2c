"""Ordinary errors of the operating system in one line, with the way out: no traceback helps against a full disk.

Of an ``OSError`` that says what the machine lacks (space, files, memory, permission) the reason is known; where in the
program it struck is not what a person has to know.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from evener.errors import StorageError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""There is no room for more."""
CLOSED = frozenset({errno.EPIPE, errno.ESHUTDOWN, errno.EIO, errno.EBADF})
"""Of a stream: nobody reads it any more; a terminal that is gone says EIO."""
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
    """Whether it says what the machine lacks or forbids, of which a traceback would tell nothing more."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def words(error: OSError) -> str:
    """What happened to which file, and the way out, in one line."""
    places = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    said = f"{error.strerror or error}" + (f": {places}" if places else "")
    cure = _CURES.get(error.errno or 0, "")
    return " ".join((f"{said}; {cure}" if cure else said).split())


@contextmanager
def in_words(doing: str) -> Iterator[None]:
    """Errors of the operating system within become a `StorageError` that begins with ``doing``."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{doing}: {words(error)}") from error
