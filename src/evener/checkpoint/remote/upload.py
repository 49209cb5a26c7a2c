"""Uploads what a run writes: checkpoints by all ranks, and everything else by the first.

::

    rank 0       remove the list of an earlier checkpoint of this name, write the mark ─┐
    every rank   upload this rank's part of the files in its host's directory ──────────┤
    rank 0       are all files there, in their lengths? write the list, sums.json ──────┤   now readers accept it
    rank 0       records, settings, pointers; remove checkpoints that are not kept ─────┘

A failure does not end the run: it goes on with its local directory, and the next save tries again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.checkpoint import checksums as sums
from evener.checkpoint import layout as folder
from evener.checkpoint.remote.fetch import POINTERS, SMALL, UNSENT, as_writer, merge, whole_in
from evener.checkpoint.remote.files import RemoteFiles
from evener.checkpoint.remote.lock import RemoteLock
from evener.checkpoint.run_mark import MARK
from evener.core.elsewhere import url_of
from evener.errors import CheckpointError, ConfigurationError, StorageError
from evener.files import LONGEST, parsed

if TYPE_CHECKING:
    from evener.checkpoint.writer import Writers


class RemoteRun:
    """The directory elsewhere that a run writes, on one of its ranks.

    Args:
        path: The run's local directory.
        tell: Called with messages on rank 0.
    """

    def __init__(self, path: Path, tell: Callable[[str], object]) -> None:
        self._path, self._tell = path, tell
        self.url = str(url_of(path))
        self.files = RemoteFiles(self.url)
        self._lock = RemoteLock(self.files, tell)
        self._whole: dict[str, bytes] = {}
        """The list of files of each checkpoint that is whole elsewhere."""
        self.not_uploaded = ""
        """What an earlier run on rank 0's host could not upload, in words; the same on all ranks."""
        self._sent: dict[str, tuple[int, int]] = {}
        """Length and time of each small file as it is elsewhere."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Locks the directory and makes the local one like it. Called on rank 0.

        Raises:
            ConfigurationError: If another run has it, or nothing can be written there.
            StorageError: If it cannot be read.
        """
        with ExitStack() as stack:
            stack.enter_context(as_writer(self._path))
            try:
                stack.enter_context(self._lock)
            except StorageError as error:
                raise ConfigurationError(f"{self.url} cannot hold a run: {error}") from error
            is_like = merge(self.files, self._path, self._tell, records=True)
            self._whole = {
                name: content for name, (content, _) in whole_in(self.files, self.files.sizes()).items()
            }
            (self._path / UNSENT).touch()
            if is_like:
                self._sent = {name: _state_of(path) for name, path in self._small_files()}
            yield

    def lacks(self) -> str:
        """Returns the name of the latest checkpoint if it is here and not elsewhere, on rank 0."""
        latest = folder.named(self._path / folder.CHECKPOINTS / folder.LATEST)
        return "" if f"{folder.CHECKPOINTS}/{latest}" in self._whole else latest

    # Checkpoints, on all ranks

    def upload(self, directory: Path, writers: Writers) -> str:
        """Uploads the latest checkpoint, and the best one if it is not there yet. A collective call.

        Returns:
            What went wrong, on all ranks; empty if everything is there.
        """
        first = writers.rank == 0
        try:
            begin = partial(self._begin, directory) if first else _nothing
            for name in writers.together(begin, directory, "upload")[0]:
                writers.together(partial(self._send_part, directory / name, writers), directory, "upload")
                complete = partial(self._complete, directory / name) if first else _nothing
                writers.together(complete, directory, "upload")
            writers.together(self.finish if first else _nothing, directory, "upload")
        except CheckpointError as error:
            latest = folder.named(directory / folder.LATEST)
            return f"{latest}, or what is beside it, is not whole in {self.url}: {error}"
        return ""

    def _begin(self, directory: Path) -> list[str]:
        """Returns the names of the checkpoints that are to be uploaded, after making room for them."""
        (self._path / UNSENT).touch()
        self._lock.check()
        latest, best = (folder.named(directory / name) for name in (folder.LATEST, folder.BEST))
        names = [
            name
            for name in dict.fromkeys(filter(None, (latest, best)))
            if self._whole.get(self._place(directory / name)) != (directory / name / sums.SUMS).read_bytes()
        ]
        for name in names:
            place = self._place(directory / name)
            if self.files.sizes(place) and not self._is_marked(place):
                raise StorageError(f"{self.url}/{place} is there and is not of Evener: move it away")
            self._whole.pop(place, None)
            self.files.remove([f"{place}/{sums.SUMS}"])
            self.files.upload(f"{place}/{MARK}", directory / name / MARK)
        return names

    def _place(self, checkpoint: Path) -> str:
        return checkpoint.relative_to(self._path).as_posix()

    def _is_marked(self, place: str) -> bool:
        """Returns True if Evener wrote a checkpoint elsewhere under this name, or began to."""
        try:
            mark: Any = parsed(self.files.read(f"{place}/{MARK}", LONGEST).decode())
            steps = folder.STEP.fullmatch(place.rpartition("/")[2])
            return steps is not None and mark["written_by"] == "evener" and mark["steps"] == int(steps[1])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False

    def _send_part(self, checkpoint: Path, writers: Writers) -> None:
        """Uploads this rank's part of the files. Other hosts than the first rank's have pieces of tensors alone."""
        host = writers.hosts[writers.rank]
        beside = [rank for rank, other in enumerate(writers.hosts) if other == host]
        here = sorted(name for name in sums.sums_in(checkpoint) if (checkpoint / name).is_file())
        own = [name for name in here if name.startswith("__")] if host != writers.hosts[0] else here
        for name in own[beside.index(writers.rank) :: len(beside)]:
            self.files.upload(f"{self._place(checkpoint)}/{name}", checkpoint / name)

    def _complete(self, checkpoint: Path) -> None:
        place, listed = self._place(checkpoint), sums.sums_in(checkpoint)
        sizes = self.files.sizes(place)
        for name, (nbytes, _) in listed.items():
            found = sizes.get(f"{place}/{name}")
            if found != nbytes:
                state = "is not there" if found is None else f"has {found:,} bytes of {nbytes:,}"
                raise StorageError(f"{self.url}/{place}/{name} {state} after it was uploaded")
        self._lock.check()
        content = (checkpoint / sums.SUMS).read_bytes()
        self.files.write(f"{place}/{sums.SUMS}", content)
        self._whole[place] = content

    # Everything else, on rank 0

    def finish(self) -> bool:
        """Uploads the other files that have changed, and removes checkpoints that are gone here.

        Returns:
            True if the last checkpoint is there, or there is none.

        Raises:
            StorageError: If that fails, or the lock is lost.
        """
        if not (self._path / MARK).is_file():
            if not self._sent and not self._whole:  # nothing has begun
                return True
            raise StorageError(f"{self._path}, from which {self.url} is uploaded, was removed")
        self._lock.check()
        for name, path in self._small_files():
            state = _state_of(path)
            if self._sent.get(name) != state:
                self.files.upload(name, path)
                self._sent[name] = state
        gone = [name for name in self._sent if not os.path.lexists(self._path / name)]
        self.files.remove([name for name in gone if name in (*SMALL, *_pointers())])
        for name in gone:
            del self._sent[name]
        if self.lacks():
            return False  # those before it are needed
        self._prune()
        (self._path / UNSENT).unlink(missing_ok=True)
        return True

    def _small_files(self) -> Iterator[tuple[str, Path]]:
        """Yields the files of the run but for its checkpoints. A pointer only if its checkpoint is whole elsewhere."""
        for root, directories, names in os.walk(self._path):
            inner = [Path(root) / name for name in directories]  # but for other runs in this one's directory
            directories[:] = [
                path.name
                for path in inner
                if path != self._path / folder.CHECKPOINTS and not (path / MARK).exists()
            ]
            for name in sorted(names):
                path = Path(root) / name
                if not name.startswith(".") and path.is_file() and not path.is_symlink():
                    yield path.relative_to(self._path).as_posix(), path
        for place in self._whole:
            path = self._path / place / folder.EVALUATION
            if path.is_file():
                yield f"{place}/{folder.EVALUATION}", path
        for name in _pointers():
            path = self._path / name
            target = folder.BEST if path.name == folder.BEST_VALUE else path.name
            if (
                path.is_file()
                and f"{folder.CHECKPOINTS}/{folder.named(path.with_name(target))}" in self._whole
            ):
                yield name, path

    def _prune(self) -> None:
        """Removes checkpoints of Evener that are not here: those that are not kept, and remains of killed uploads."""
        sizes = self.files.sizes(folder.CHECKPOINTS)
        for place in {name.rpartition("/")[0] for name in sizes} - {folder.CHECKPOINTS}:
            if (self._path / place).is_dir() or not self._is_marked(place):
                continue
            names = [name.rpartition("/")[2] for name in sizes if name.startswith(f"{place}/")]
            own = [name for name in names if sums.NAME.fullmatch(name) and name != MARK]
            self.files.remove([f"{place}/{name}" for name in (sums.SUMS, *own, MARK)])
            self.files.remove_directory(place)
            self._whole.pop(place, None)


def _state_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _pointers() -> list[str]:
    return [f"{folder.CHECKPOINTS}/{name}" for name in POINTERS]


def _nothing() -> None:
    pass
