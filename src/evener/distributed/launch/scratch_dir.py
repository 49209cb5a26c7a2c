"""The private directory of a launcher, in which it and its ranks exchange files; removed at the end of the run.

A launcher killed by SIGKILL leaves its directory behind. The directory names its owner, so that the next launcher can
remove it. Other users of the machine may create directories with such names among the temporary files, so only
directories that belong to this user and are closed to others are examined. (``XDG_RUNTIME_DIR`` would be private, but
is removed when its user logs out, while a run may go on.)
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from evener.core.os_errors import storage_errors
from evener.files import read_json

UNWRITTEN = "the launcher's directory among the temporary files, which TMPDIR names, cannot be written"

_PREFIX = "evener-run-"
_OWNER = "owner"
_LONGEST = 4096


@contextmanager
def scratch() -> Iterator[Path]:
    """Creates a directory for the block, after removing those of dead launchers.

    Raises:
        StorageError: If it cannot be made or written.
    """
    clear(Path(tempfile.gettempdir()))
    with ExitStack() as stack:
        with storage_errors(UNWRITTEN):
            made = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
            path = Path(stack.enter_context(made))
            (path / _OWNER).write_text(json.dumps([*_here(), os.getpid(), _begin(os.getpid())]))
        yield path


def clear(home: Path) -> None:
    """Removes the directories in ``home`` that killed launchers left behind."""
    for path in home.glob(f"{_PREFIX}*"):
        if _is_private(path) and _is_left(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_private(path: Path) -> bool:
    """Returns True if ``path`` is a directory to which only this user has access."""
    try:
        found = path.lstat()
    except OSError:
        return False
    others = stat.S_IRWXG | stat.S_IRWXO
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & others


def _is_left(path: Path) -> bool:
    """Returns True if the owner is known to be dead. An owner in another container or on another host is not known."""
    try:
        host, namespace, pid, begin = read_json(path / _OWNER, _LONGEST, follow=False)
    except (OSError, ValueError, TypeError):
        return False
    return type(pid) is int and [host, namespace] == _here() and _begin(pid) != begin


def _here() -> list[str]:
    """Returns host name and process namespace, within which a process id is unique."""
    with suppress(OSError):
        return [socket.gethostname(), os.readlink("/proc/self/ns/pid")]
    return [socket.gethostname(), ""]


def _begin(pid: int) -> int | None:
    """Returns the start time of the process in ticks since boot, which clock changes do not affect. Returns None if it
    does not exist, or has ended and its parent has not asked for its status (a zombie)."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if found[0] == "Z" else int(found[19])
