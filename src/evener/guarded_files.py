"""Files that a stranger may have written, read without waiting and without end.

A directory that was downloaded, or lies where others may write, can hold a pipe that nobody writes to, a link to
``/dev/zero``, or a gigabyte where a line is expected. Everything that reads a run directory opens its files here:
regular files alone, and no more of them than there may be.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

LONGEST = 1 << 28
"""Bytes of a text that is read whole: far more than any file that Evener writes of itself takes."""


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Opens a regular file for reading.

    Args:
        follow: Whether the file may be behind a symbolic link.

    Raises:
        OSError: If it cannot be opened, or is a pipe, a socket, a device or a directory.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    number = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return os.fdopen(number, "rb")


def read_bytes(path: Path, most: int = LONGEST, *, follow: bool = True) -> bytes:
    """All of a regular file.

    Raises:
        OSError: As `open_regular`, or if it has more than ``most`` bytes.
    """
    with open_regular(path, follow=follow) as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise OSError(errno.EINVAL, f"more than {most:,} bytes", str(path))
    return found


def read_text(path: Path, most: int = LONGEST, *, follow: bool = True) -> str:
    """All of a regular file of UTF-8.

    Raises:
        OSError: As `read_bytes`.
        ValueError: If it is no UTF-8.
    """
    return read_bytes(path, most, follow=follow).decode()


def read_json(path: Path, most: int = LONGEST, *, follow: bool = True) -> Any:
    """What a file of JSON holds.

    Raises:
        OSError: As `read_bytes`.
        ValueError: If it is no JSON, or JSON of too many levels.
    """
    return parsed(read_text(path, most, follow=follow))


def parsed(text: str) -> Any:
    """What a text of JSON says.

    Raises:
        ValueError: If it is no JSON, or JSON of too many levels.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it has too many levels") from None
