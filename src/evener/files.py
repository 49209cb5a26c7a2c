"""Files that a stranger may have written, read without waiting and without end; and files written whole or not at all.

A directory that was downloaded, or lies where others may write, can hold a pipe that nobody writes to, a link to
``/dev/zero``, or a gigabyte where a line is expected. The kernel's own files (``/proc/self/pagemap``) call themselves
regular and of no length, and some have no end. Everything that reads a run directory opens its files here: regular
files alone, no further than their length, and no more of them than there may be.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

PACKAGE = Path(__file__).parent
"""Where Evener's own code is."""
LONGEST = 1 << 28
"""Bytes of a text that is read whole: far more than any file that Evener writes of itself takes."""
LONGEST_LINE = 1 << 26
"""Bytes of a line: a record of a hundred thousand ranks has fewer."""
_BUFFER = 1 << 17


class _Bounded(io.FileIO):
    """A file that ends where it ended when it was opened."""

    def __init__(self, number: int, end: int) -> None:
        super().__init__(number, "rb")
        self._end = end

    def readinto(self, buffer: Any) -> int | None:
        left = max(self._end - self.tell(), 0)
        return super().readinto(memoryview(buffer).cast("B")[:left])

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            return self.readall()
        return super().read(min(size, max(self._end - self.tell(), 0))) or b""

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self.read(_BUFFER), b""))


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Opens a regular file for reading.

    Args:
        follow: Whether the file may be behind a symbolic link.

    Raises:
        OSError: If it cannot be opened, or is a pipe, a socket, a device, a directory, or a file of the kernel's that
            does not know its length.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    number = os.open(path, flags)
    try:
        found = os.fstat(number)
        endless = stat.S_ISREG(found.st_mode) and not found.st_size and bool(os.pread(number, 1, 0))
        if not stat.S_ISREG(found.st_mode) or (endless and not os.fstat(number).st_size):
            raise OSError(errno.EINVAL, "no regular file", str(path))
    except OSError:
        os.close(number)
        raise
    return io.BufferedReader(_Bounded(number, found.st_size), _BUFFER)


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; one that is longer than `LONGEST_LINE` comes in parts."""
    return iter(lambda: file.readline(LONGEST_LINE), b"")


def read_bytes(path: Path, most: int = LONGEST, *, follow: bool = True) -> bytes:
    """All of a regular file.

    Raises:
        OSError: As `open_regular`, or if it has more than ``most`` bytes.
    """
    with open_regular(path, follow=follow) as file:
        found = file.read(min(most, os.fstat(file.fileno()).st_size) + 1)
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


def dumps(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: numbers that are not finite, for which JSON has no word, become null."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Any) -> None:
    """Writes a file of JSON whole or not at all."""
    replace_text(path, dumps(value, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all, in a directory that is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
