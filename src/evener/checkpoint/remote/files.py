"""Reads and writes files under a URL with fsspec. Every operation has a time limit, and is tried again if it fails.

fsspec itself has no limits: a filesystem may wait forever for a network that is gone. So each operation runs in a
thread of its own, which is abandoned at the limit.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from evener.checkpoint.layout import CHECKPOINTS, STEP
from evener.core.os_errors import os_error_message
from evener.core.text import said
from evener.errors import ConfigurationError, StorageError

R = TypeVar("R")

SECONDS = 60.0
"""Longest duration of one operation on a small file."""
LEAST_RATE = 1 << 18
"""Bytes per second; a slower transfer of a large file is given up."""
PAUSES = (1.0, 4.0)
"""Seconds before the second and the third try."""
_CHUNK = 1 << 25
_CERTAIN = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
"""Errors that another try would repeat."""


class RemoteFiles:
    """The files under a URL, by their names relative to it.

    Raises:
        ConfigurationError: If fsspec or the package of the protocol is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            core: Any = importlib.import_module("fsspec.core")
            self._fs, base = core.url_to_fs(url)
        except ImportError as error:
            raise ConfigurationError(
                f"{url} needs a package that is not installed: {said(error)}. Evener's extra `elsewhere` "
                "installs fsspec, and each protocol has its own package, such as s3fs for s3:// and gcsfs for gs://"
            ) from error
        except Exception as error:  # an unknown protocol, or settings that its package refuses
            raise ConfigurationError(f"{url} cannot be opened: {said(error)}") from error
        self._base = str(base).rstrip("/")

    @property
    def is_of_this_process(self) -> bool:
        """True if no other process sees these files."""
        return self.url.startswith("memory:")

    def sizes(self, name: str = "") -> dict[str, int]:
        """Returns the lengths of the files by name: those of the directory, its checkpoints and their files."""
        found: dict[str, int] = {}
        prefix = f"{name}/" if name else ""
        for entry in self._entries(name):
            own = str(entry["name"]).rstrip("/").rpartition("/")[2]
            if entry["type"] != "directory":
                found[prefix + own] = int(entry["size"] or 0)
            elif own == CHECKPOINTS or STEP.fullmatch(own):
                found |= self.sizes(prefix + own)
        return found

    def _entries(self, name: str) -> list[dict[str, Any]]:
        place = self._path(name)

        def listed() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()
            entries: list[dict[str, Any]] = self._fs.ls(place, detail=True)
            return [entry for entry in entries if str(entry["name"]).strip("/") != place.strip("/")]

        try:
            return self._tried(f"{self._shown(name)} cannot be listed", listed)
        except FileNotFoundError:
            return []

    def read(self, name: str, most: int) -> bytes:
        """Returns the content of a file.

        Raises:
            FileNotFoundError: If there is none.
            StorageError: If it cannot be read, or has more than ``most`` bytes.
        """
        found: bytes = self._tried(
            f"{self._shown(name)} cannot be read",
            lambda: self._fs.cat_file(self._path(name), start=0, end=most + 1),
            most if most < _CHUNK else _CHUNK,
        )
        if len(found) > most:
            raise StorageError(f"{self._shown(name)} has more than {most:,} bytes")
        return found

    def download(self, name: str, to: Path, nbytes: int) -> None:
        """Writes ``nbytes`` bytes of a file, which must be all of it, to a local file, atomically."""
        unfinished = to.with_name(f".{to.name}.{os.getpid()}")
        what = f"{self._shown(name)} cannot be read"
        try:
            with unfinished.open("wb") as file:
                for start in range(0, nbytes, _CHUNK):
                    end = min(start + _CHUNK, nbytes)
                    part = self._tried(what, self._reading(name, start, end), end - start)
                    if len(part) != end - start:
                        raise StorageError(f"{self._shown(name)} ended after {start + len(part)} bytes")
                    file.write(part)
            unfinished.replace(to)
        except FileNotFoundError as error:
            raise StorageError(f"{what}: it is not there any more") from error
        except OSError as error:
            raise StorageError(
                f"{self._shown(name)} cannot be kept here: {os_error_message(error)}"
            ) from error
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)

    def _reading(self, name: str, start: int, end: int) -> Callable[[], bytes]:
        return lambda: bytes(self._fs.cat_file(self._path(name), start=start, end=end))

    def upload(self, name: str, path: Path) -> None:
        """Writes a local file. Not atomic on filesystems that store no whole objects."""
        nbytes = path.stat().st_size
        self._write(name, lambda: self._fs.put_file(str(path), self._path(name)), nbytes)

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file."""
        self._write(name, lambda: self._fs.pipe_file(self._path(name), content))

    def create(self, name: str, content: bytes) -> None:
        """Writes a small file that must not exist yet. Where the filesystem cannot do this in one, it asks before.

        Raises:
            FileExistsError: If it exists.
        """

        def created() -> None:
            try:
                self._fs.pipe_file(self._path(name), content, mode="create")
            except (FileExistsError, FileNotFoundError, PermissionError):
                raise
            except Exception as error:  # many stores and packages do not know how
                if self._fs.exists(self._path(name)):
                    raise FileExistsError(name) from error
                self._fs.pipe_file(self._path(name), content)

        self._write(name, created)

    def _write(self, name: str, act: Callable[[], object], nbytes: int = 0) -> None:
        def written() -> None:
            try:
                act()
            except FileNotFoundError:
                self._make_parents(self._path(name))
                act()

        what = f"{self._shown(name)} cannot be written"
        try:
            self._tried(what, written, nbytes)
        except FileExistsError:
            raise
        except OSError as error:
            raise StorageError(f"{what}: {said(error) or type(error).__name__}") from error

    def _make_parents(self, path: str) -> None:
        """Makes directories above ``path``, but for the first, which may be a bucket."""
        parts = path.split("/")
        for end in range(2, len(parts)):
            place = "/".join(parts[:end])
            if not self._fs.isdir(place):
                with suppress(FileExistsError):
                    self._fs.mkdir(place, create_parents=False)

    def remove(self, names: Collection[str]) -> None:
        """Removes files, in their order; those that do not exist are passed over."""
        for name in names:
            with suppress(FileNotFoundError):
                what = f"{self._shown(name)} cannot be removed"
                self._tried(what, partial(self._fs.rm_file, self._path(name)))

    def remove_directory(self, name: str) -> None:
        """Removes a directory if it is empty and the filesystem has directories of their own."""
        with suppress(OSError, NotImplementedError, StorageError):
            self._tried("", partial(self._fs.rmdir, self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def _shown(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _tried(self, what: str, act: Callable[[], R], nbytes: int = 0) -> R:
        """Calls ``act`` up to three times.

        Raises:
            FileNotFoundError, FileExistsError: As ``act`` does.
            StorageError: After any other error.
        """
        for pause in (*PAUSES, None):
            try:
                return _within(SECONDS + nbytes / LEAST_RATE, act)
            except (FileNotFoundError, FileExistsError):
                raise
            except Exception as error:  # whatever the protocol's package raises
                if pause is None or isinstance(error, _CERTAIN):
                    reason = said(error) or type(error).__name__
                    raise StorageError(f"{what}: {reason}") from error
                time.sleep(pause)
        raise AssertionError


def _within(seconds: float, act: Callable[[], R]) -> R:
    """Calls ``act`` in a thread, which is abandoned after ``seconds``."""
    found: Future[R] = Future()

    def call() -> None:
        try:
            found.set_result(act())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=call, name="evener-transfer", daemon=True).start()
    try:
        return found.result(seconds)
    except TimeoutError:
        if found.done():
            raise
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
