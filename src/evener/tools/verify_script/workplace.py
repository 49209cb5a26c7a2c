"""Working directory of a verification run: a copy of the user's, which is removed afterwards.

A script that runs several times would otherwise find its own earlier output: resume from its checkpoint, or overwrite
one of the user's. Files are copied. Large files are symbolic links, and so are directories with many files, until the
script writes there (:mod:`evener.tools.verify_script.link_guard`). The parent directories are imitated too, for paths
such as ``../data``.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MOST_FILES = 500
"""Largest number of files and subdirectories in a directory that is copied."""
_MOST_BYTES = 2**24
"""Largest size of a file that is copied."""
_ABOVE = 3
"""Number of parent directories that are imitated."""
PREFIX = "evener-proof-"
"""Beginning of the name of the directory of a workplace."""
_SKIPPED = {".git", "__pycache__", ".venv", "venv", "node_modules"}


@contextmanager
def workplace() -> Iterator[Path]:
    """Makes a directory that looks like the working directory, and removes it at the end."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        above = list(reversed([here, *here.parents][: _ABOVE + 1]))
        place = Path(name)
        for directory, below in itertools.pairwise(above):
            link_all(directory, place, without=below.name)
            place /= below.name
            place.mkdir()
        _copy_all(here, place)
        yield place


def link_all(source: Path, place: Path, without: str = "") -> None:
    """Makes links in ``place`` to all entries of ``source``, except the one named ``without``."""
    with suppress(OSError):
        for entry in _entries(source):
            if entry.name != without:
                (place / entry.name).symlink_to(entry.path)


def _copy_all(source: Path, place: Path) -> None:
    for entry in _entries(source):
        with suppress(OSError):
            _copy(entry, place / entry.name)


def _entries(source: Path) -> list[os.DirEntry[str]]:
    """Returns the entries of a directory, except directories that this module makes."""
    with os.scandir(source) as entries:
        return [entry for entry in entries if not entry.name.startswith(PREFIX)]


def _copy(entry: os.DirEntry[str], place: Path) -> None:
    if entry.is_dir(follow_symlinks=False) and entry.name not in _SKIPPED and _is_small(entry.path):
        place.mkdir()
        _copy_all(Path(entry.path), place)
    elif entry.is_file(follow_symlinks=False) and entry.stat().st_size <= _MOST_BYTES:
        shutil.copy2(entry.path, place)
    else:
        place.symlink_to(entry.path)


def _is_small(directory: str) -> bool:
    count = 0
    for _, directories, files in os.walk(directory):
        count += len(directories) + len(files)
        if count > _MOST_FILES:
            return False
    return True
