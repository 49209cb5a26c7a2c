"""Brings a run directory that lies elsewhere to its local directory.

What is elsewhere counts, and the local directory is made alike. There is one exception: if a run on this host could not
upload all that it wrote, and nobody has gone on with it elsewhere since, the local directory is ahead and counts.
Anything else that was never uploaded is moved aside, and not removed.

Nothing that comes from elsewhere is trusted: only files with names that Evener gives are written, in the lengths that
were announced, and what reads them checks them as it checks local files.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from evener.checkpoint import checksums as sums
from evener.checkpoint import layout as folder
from evener.checkpoint.remote.files import RemoteFiles
from evener.checkpoint.run_mark import MARK, run_in
from evener.core.attempts import ATTEMPTS
from evener.core.elsewhere import url_of
from evener.core.os_errors import storage_errors
from evener.core.record_index import INDEX
from evener.core.records import RECORDS
from evener.data.shard_counts import COUNTS
from evener.errors import ConfigurationError, StorageError
from evener.files import LONGEST, parsed

UNSENT = ".unsent"
"""Exists in a local directory from the start of a run until everything is uploaded."""
SMALL = (MARK, "config.json", "task.json", "summary.json", COUNTS, RECORDS, INDEX, ATTEMPTS)
"""Files of a run beside its checkpoints."""
POINTERS = (folder.LATEST, folder.BEST, folder.BEST_VALUE)
_MERGING, _RUNNING = ".merging.lock", ".running.lock"
_LONGEST_POINTER = 10_000
_MERGE_SECONDS = 600.0

Whole = Mapping[str, tuple[bytes, Mapping[str, tuple[int, int]]]]
"""For each whole checkpoint, by its name in the run directory, its ``sums.json`` as bytes and parsed."""


def base_of(path: Path) -> Path:
    """Returns the run directory, or the lone directory of checkpoints, that holds ``path``."""
    if folder.STEP.fullmatch(path.name) or path.name in (folder.LATEST, folder.BEST):
        path = path.parent
    return path.parent if path.name == folder.CHECKPOINTS else path


def whole_in(files: RemoteFiles, sizes: Mapping[str, int]) -> Whole:
    """Returns the whole checkpoints elsewhere: those whose list of files is there, and all files in their lengths."""
    found = {}
    for name, nbytes in sizes.items():
        place, _, last = name.rpartition("/")
        if last != sums.SUMS or not folder.STEP.fullmatch(place.rpartition("/")[2]):
            continue
        with suppress(ValueError, FileNotFoundError):
            content = files.read(name, min(nbytes, LONGEST))
            listed = sums.checked(parsed(content.decode()))
            if all(sizes.get(f"{place}/{each}") == length for each, (length, _) in listed.items()):
                found[place] = content, listed
    return found


def fetched(
    path: Path,
    tell: Callable[[str], object] = warnings.warn,
    *,
    records: bool = False,
    checkpoint: bool = False,
) -> Path:
    """Brings a run directory or a checkpoint here, and returns ``path``. Does nothing for one that lies not elsewhere.

    Args:
        records: Whether to bring the records of the steps, too.
        checkpoint: Whether to bring the tensors of the checkpoint to resume from, too.

    Raises:
        ConfigurationError: If there is nothing, or its protocol's package is missing.
        StorageError: If it cannot be read.
    """
    if url_of(path) is None:
        return path
    base = base_of(path)
    url = str(url_of(base))
    files = RemoteFiles(url)
    sizes = files.sizes()
    if not sizes and not (base / UNSENT).exists():
        raise ConfigurationError(f"there is no run at {url}")
    with _as_reader(base) as is_free:
        if is_free:
            merge(files, base, tell, records)
        if not checkpoint:
            return path
        with suppress(ConfigurationError):  # which the caller finds again
            for place in folder.candidates(path):
                fetch_checkpoint(files, base, place, sizes)
                if not sums.damage(place):
                    break
    return path


def is_run_directory(path: Path) -> bool:
    """Returns True if a path is a directory with checkpoints, here or elsewhere, and none of them."""
    url = url_of(path)
    if url is None:
        return (path / folder.CHECKPOINTS).is_dir()
    return any(name.startswith(f"{folder.CHECKPOINTS}/") for name in RemoteFiles(url).sizes())


@contextmanager
def _as_reader(base: Path) -> Iterator[bool]:
    """Yields True if no run on this host writes there. Its local directory is newer than what is elsewhere."""
    with _merging(base):
        running = FileLock(base / _RUNNING, timeout=0)
        try:
            running.acquire()
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            running.release()


@contextmanager
def _merging(base: Path) -> Iterator[None]:
    lock = FileLock(base / _MERGING, timeout=_MERGE_SECONDS)
    with storage_errors(f"{base}, where {url_of(base)} is kept, cannot be written"):
        base.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise StorageError(
                f"another process has read {url_of(base)} for {_MERGE_SECONDS:.0f} s"
            ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def as_writer(base: Path) -> Iterator[None]:
    """Holds the local directory for a run.

    Raises:
        ConfigurationError: If another run on this host has it.
    """
    running = FileLock(base / _RUNNING, timeout=0)
    with _merging(base):
        try:
            running.acquire()
        except Timeout:
            raise ConfigurationError(
                f"another run on this host writes to {url_of(base)}: name another directory with --run-dir, or wait "
                "for its end"
            ) from None
    try:
        yield
    finally:
        running.release()


def merge(files: RemoteFiles, base: Path, tell: Callable[[str], object], records: bool) -> bool:
    """Makes the local directory like the one elsewhere, but for the files of tensors. The caller holds it.

    Args:
        records: Whether to bring the records, which may be large.

    Returns:
        False if the local directory is ahead, and was left as it is.
    """
    sizes = files.sizes()
    whole = whole_in(files, sizes)
    if (base / UNSENT).exists():
        if _is_ahead(files, base, sizes, whole):
            return False
        if any(_name_in(base, each.path) not in whole for each in folder.saved_in(base / folder.CHECKPOINTS)):
            _move_aside(base, tell)
    with storage_errors(f"{base}, where {url_of(base)} is kept, cannot be written"):
        if MARK not in sizes:
            # Also remains of killed saves: no run of here marks them now.
            folder.clear(base / folder.CHECKPOINTS)
        pointers = [f"{place}{name}" for place in ("", f"{folder.CHECKPOINTS}/") for name in POINTERS]
        for name in (*SMALL, *pointers):
            (base / name).parent.mkdir(parents=True, exist_ok=True)
            if name not in sizes:
                (base / name).unlink(missing_ok=True)
            elif (
                records
                if name in (RECORDS, INDEX)
                else sizes[name] <= (LONGEST if name in SMALL else _LONGEST_POINTER)
            ):
                files.download(name, base / name, sizes[name])
        for directory in (base, base / folder.CHECKPOINTS):
            for saved in folder.saved_in(directory):
                content, _ = whole.get(_name_in(base, saved.path), (b"", {}))
                if not content or not _is_same(saved.path, content):
                    folder.remove(saved.path)
        for name, (content, listed) in whole.items():
            (base / name).mkdir(parents=True, exist_ok=True)
            (base / name / sums.SUMS).write_bytes(content)
            if MARK in listed:
                files.download(f"{name}/{MARK}", base / name / MARK, listed[MARK][0])
    return True


def _name_in(base: Path, checkpoint: Path) -> str:
    return checkpoint.relative_to(base).as_posix()


def _is_same(checkpoint: Path, content: bytes) -> bool:
    try:
        return (checkpoint / sums.SUMS).read_bytes() == content
    except OSError:
        return False


def _is_ahead(files: RemoteFiles, base: Path, sizes: Mapping[str, int], whole: Whole) -> bool:
    """Returns True if the run elsewhere, if there is one, is that of the local directory, which knows all of its
    checkpoints or has a later one.
    """
    here, there = run_in(base), None
    if MARK in sizes:
        with suppress(ValueError, FileNotFoundError, AttributeError):
            there = parsed(files.read(MARK, min(sizes[MARK], LONGEST)).decode()).get("run")
    if here is None or (there is not None and there != here.run):
        return False
    unknown = [name for name, (content, _) in whole.items() if not _is_same(base / name, content)]
    steps = [each.steps for each in folder.saved_in(base / folder.CHECKPOINTS) if not sums.damage(each.path)]
    return all(int(name.rpartition("-")[2]) < max(steps, default=-1) for name in unknown)


def _move_aside(base: Path, tell: Callable[[str], object]) -> None:
    """Keeps what was never uploaded, although another run has what is elsewhere by now, as a run directory."""
    aside = user_cache_path("evener") / "not-uploaded" / f"{base.name}-{uuid.uuid4().hex[:8]}"
    with storage_errors(f"{base} cannot be moved to {aside}"):
        aside.mkdir(parents=True)
        for name in (*SMALL, folder.CHECKPOINTS, UNSENT):
            with suppress(FileNotFoundError):
                (base / name).rename(aside / name)
        (aside / UNSENT).unlink(missing_ok=True)
    tell(f"what an earlier run on this host could not upload to {url_of(base)} is kept in {aside}")


def fetch_checkpoint(files: RemoteFiles, base: Path, checkpoint: Path, sizes: Mapping[str, int]) -> None:
    """Brings those files of a checkpoint here that are not here already, if it is whole elsewhere.

    Raises:
        StorageError: If they cannot be read, or not be written here.
    """
    name = _name_in(base, checkpoint)
    own = {key: nbytes for key, nbytes in sizes.items() if key.startswith(f"{name}/")}
    if name not in (whole := whole_in(files, own)) or not _is_same(checkpoint, whole[name][0]):
        return
    for each, expected in whole[name][1].items():
        path = checkpoint / each
        if not path.is_file() or path.stat().st_size != expected[0] or sums.sum_of(path) != expected:
            files.download(f"{name}/{each}", path, expected[0])
    extra = f"{name}/{folder.EVALUATION}"
    if extra in own and folder.EVALUATION not in whole[name][1] and own[extra] <= LONGEST:
        files.download(extra, checkpoint / folder.EVALUATION, own[extra])
