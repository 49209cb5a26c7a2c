"""Safe reading of untrusted files, and atomic writing.

A directory that was downloaded, or that others may write to, can hold a pipe without a writer, a link to ``/dev/zero``,
or a gigabyte where a line is expected. Some kernel files (``/proc/self/pagemap``) claim to be regular files of length 0
and never end. All code that reads a run directory opens its files with this module: it opens regular files only, reads
no further than their length, and limits the number of bytes. Files that a user names are read with `read_named`, which
also reads a pipe of the shell.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

PACKAGE = Path(__file__).parent
"""The directory of Evener's source code."""
LONGEST = 1 << 28
"""Maximum size, in bytes, of a file that is read as a whole: far more than any file that Evener writes."""
LONGEST_LINE = 1 << 26
"""Maximum length of a line, in bytes: a record of a hundred thousand ranks is shorter."""
_BUFFER = 1 << 17
_GIVEN = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/", os.devnull)
"""Beginnings of the paths of what cannot be harmed by opening it, and mostly has a writer."""


class _Bounded(io.FileIO):
    """A file that is read no further than byte ``end``, its length when it was opened."""

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
        follow: Whether ``path`` may be a symbolic link.

    Raises:
        OSError: If the file cannot be opened, or is a pipe, a socket, a device, a directory, or a kernel file that
            reports length 0 although it has content.
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
    """Iterates over the lines of a file. A line longer than `LONGEST_LINE` is split."""
    return iter(lambda: file.readline(LONGEST_LINE), b"")


def read_bytes(path: Path, most: int = LONGEST, *, follow: bool = True) -> bytes:
    """Reads a whole regular file.

    Raises:
        OSError: If `open_regular` raises it, or if the file has more than ``most`` bytes.
    """
    with open_regular(path, follow=follow) as file:
        found = file.read(min(most, os.fstat(file.fileno()).st_size) + 1)
    if len(found) > most:
        raise OSError(errno.EINVAL, f"more than {most:,} bytes", str(path))
    return found


def read_text(path: Path, most: int = LONGEST, *, follow: bool = True) -> str:
    """Reads a whole regular file as UTF-8 text.

    Raises:
        OSError: If `read_bytes` raises it.
        ValueError: If the file is not valid UTF-8.
    """
    return read_bytes(path, most, follow=follow).decode()


def read_named(path: Path, most: int = LONGEST) -> str:
    """Reads a whole file that the user has named, as UTF-8 text: a regular file, ``/dev/null``, or a file that this
    process was given when it was started, such as ``/dev/stdin`` or the pipe of ``<(command)``.

    Args:
        most: Maximum size in bytes. A pipe may have no more than `LONGEST`.

    Raises:
        OSError: If the file cannot be opened, has more than ``most`` bytes, or is a directory, a device, or a pipe that
            has a name, for which it may have no writer.
        ValueError: If the file is not valid UTF-8.
    """
    place = os.path.abspath(path)
    if path.is_fifo() and not place.startswith(_GIVEN):
        raise OSError(
            errno.EINVAL, "no regular file, but a pipe; give it as /dev/stdin or <(command)", str(path)
        )
    if not place.startswith(_GIVEN) or path.is_file():
        return read_text(path, most)
    most = min(most, LONGEST)
    with path.open("rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise OSError(errno.EINVAL, f"more than {most:,} bytes", str(path))
    return found.decode()


def read_json(path: Path, most: int = LONGEST, *, follow: bool = True) -> Any:
    """Reads and parses a JSON file.

    Raises:
        OSError: If `read_bytes` raises it.
        ValueError: If the file is not valid JSON, or is nested too deeply.
    """
    return parsed(read_text(path, most, follow=follow))


def parsed(text: str) -> Any:
    """Parses JSON text.

    Raises:
        ValueError: If the text is not valid JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it has too many levels") from None


def dumps(value: Any, indent: int | None = None) -> str:
    """Serializes to strict JSON. Non-finite numbers, which JSON does not have, become null."""
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


def write_json(path: Path, value: Any, *, follow: bool = False) -> None:
    """Writes a JSON file atomically: after an error, the file is unchanged. ``follow`` is that of :func:`replacing`."""
    replace_text(path, dumps(value, indent=2) + "\n", follow=follow)


@contextmanager
def replacing(path: Path, *, follow: bool = False, sync: bool = False) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of ``path`` at the end, atomically: after an error, ``path`` is unchanged.
    Creates missing parent directories.

    Args:
        follow: Whether a link is followed, for a path that the user has named. The file behind the link is replaced
            then, and has the permissions of the one before. What is no regular file (``/dev/null``, a terminal, the
            pipe of ``>(command)``) is written into, not replaced, and so is everything in ``/dev`` and ``/proc``. In a
            run directory, which others may have made, a link is replaced and leads nowhere.
        sync: Whether the content is on the disk before the file has its name.
    """
    if follow and _is_written_into(path):
        with path.open("ab") as file:  # not "wb": the standard output may be a file with text in it
            yield file
        return
    path = _behind_link(path) if follow else path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)  # of a killed process with this number, or a link of somebody
    try:
        with partial.open("xb") as file:
            if follow and path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _behind_link(path: Path) -> Path:
    """Returns the file that a link leads to. The system decides whether this user may follow it: mostly not one that
    somebody else has put into a directory like ``/tmp``.

    Raises:
        OSError: If the link must not be followed.
    """
    if not (path.is_symlink() and path.exists()):
        return path
    os.close(os.open(path, os.O_WRONLY))
    return Path(os.path.realpath(path))


def _is_written_into(path: Path) -> bool:
    """Returns True if there is something at ``path`` that no file may take the place of."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    place = os.path.abspath(path)
    is_of_kernel = place.startswith(("/dev/", "/proc/")) and not place.startswith("/dev/shm/")  # plain files
    return not stat.S_ISDIR(mode) and (is_of_kernel or not stat.S_ISREG(mode))


def replace_text(path: Path, text: str, *, follow: bool = False) -> None:
    """Writes a text file atomically, as :func:`replacing` does."""
    with replacing(path, follow=follow) as file:
        file.write(text.encode())
