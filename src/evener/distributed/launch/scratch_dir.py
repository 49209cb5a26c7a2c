"""The private directory of a launcher, for what it and its ranks tell each other; it does not outlive the run.

A launcher that is killed by SIGKILL leaves its own. Whose it was is written there, so that the next launcher clears it.
Other users of the machine may put anything under such a name where temporary files go: only directories of this user's,
that nobody else may enter, are looked into. (``XDG_RUNTIME_DIR`` would be private, but is removed when its user logs
out, while a run may go on.)
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from evener.files import read_json

_PREFIX = "evener-run-"
_OWNER = "owner"
_LONGEST = 4096


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory of this process; those of launchers that are dead are removed first."""
    clear(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        (Path(name) / _OWNER).write_text(json.dumps([*_here(), os.getpid(), _begin(os.getpid())]))
        yield Path(name)


def clear(home: Path) -> None:
    """Removes what launchers left in ``home`` that were killed."""
    for path in home.glob(f"{_PREFIX}*"):
        if _is_private(path) and _is_left(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_private(path: Path) -> bool:
    """Whether it is a directory that this user alone can have filled."""
    try:
        found = path.lstat()
    except OSError:
        return False
    others = stat.S_IRWXG | stat.S_IRWXO
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & others


def _is_left(path: Path) -> bool:
    """Whether its owner is known to be dead; of one elsewhere, as in another container, nothing is known."""
    try:
        host, namespace, pid, begin = read_json(path / _OWNER, _LONGEST, follow=False)
    except (OSError, ValueError, TypeError):
        return False
    return type(pid) is int and [host, namespace] == _here() and _begin(pid) != begin


def _here() -> list[str]:
    """Where a process's number means something."""
    with suppress(OSError):
        return [socket.gethostname(), os.readlink("/proc/self/ns/pid")]
    return [socket.gethostname(), ""]


def _begin(pid: int) -> int | None:
    """When the process began, in ticks since boot: no clock that jumps makes it another; None if there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None
