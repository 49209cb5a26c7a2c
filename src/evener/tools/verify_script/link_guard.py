"""Keeps a script from writing through the links of its workplace.

A file of its own takes the place of a link before the script opens it for writing, and a directory of links takes that
of a link to a directory.

Python tells what it opens, renames and removes (``sys.addaudithook``). The writers of torch and safetensors open files
without Python, so they are wrapped. What is opened to be changed in place (``r+``, the default of ``numpy.memmap``)
stays a link: mostly it is read, and may be too large to be copied.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import safetensors
import safetensors.torch
import torch

from evener.tools.verify_script.workplace import PREFIX, link_all

_WRITES = os.O_WRONLY | os.O_TRUNC | os.O_APPEND
_EVENTS: dict[str, tuple[tuple[int, ...], bool]] = {
    **dict.fromkeys(("os.truncate", "os.chmod", "os.utime", "os.chdir", "shutil.rmtree"), ((0,), True)),
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir"), ((0,), False)),
    **dict.fromkeys(("os.symlink", "os.link"), ((1,), False)),
    "os.rename": ((0, 1), False),
}
"""For each event of Python, which of its arguments are paths, and whether it is about what a link at the end of a path
leads to, not about the link itself."""


class _Guard(threading.local):
    """What a thread is doing."""

    is_busy = False


_guard = _Guard()
_roots: list[str] = []
"""Directories whose links are guarded now. The hook stays when there are none: Python cannot remove it."""
_heard: list[Callable[..., None]] = []


@contextmanager
def links_guarded(place: Path) -> Iterator[None]:
    """Guards the links of the workplace that has the directory ``place``, for the block."""
    root = next(each for each in (place, *place.parents) if each.name.startswith(PREFIX))
    if not _heard:
        _heard.append(_hear)
        sys.addaudithook(_hear)
    save, serialize = torch.save, safetensors.serialize_file

    def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        _detach_named(f, copies=False)
        save(obj, f, *args, **kwargs)

    def serialized(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        _detach_named(filename, copies=False)
        serialize(tensors, filename, *args, **kwargs)

    _roots.append(os.path.realpath(root))
    try:
        with (
            patch.object(torch, "save", saved),
            patch.object(safetensors.torch, "serialize_file", serialized),
        ):
            yield
    finally:
        _roots.pop()


def _hear(event: str, args: tuple[Any, ...]) -> None:
    """Called by Python before an event."""
    if not _roots or _guard.is_busy:
        return
    if event == "open":
        path, _, flags = args
        if isinstance(flags, int) and flags & _WRITES:
            _detach_named(path, copies=not flags & os.O_TRUNC)
    elif event in _EVENTS:
        places, has_last = _EVENTS[event]
        for place in places:
            _detach_named(args[place], has_last=has_last)


def _detach_named(path: Any, copies: bool = True, has_last: bool = True) -> None:
    if not isinstance(path, str | bytes | os.PathLike):
        return  # an open file
    _guard.is_busy = True
    try:
        whole = Path(os.path.abspath(os.fsdecode(path)))
        _detach(Path(_roots[-1]), whole if has_last else whole.parent, copies)
    finally:
        _guard.is_busy = False


def _detach(root: Path, path: Path, copies: bool) -> None:
    """Puts what is its own in the place of each link on the way to ``path`` that leads out of ``root``.

    Args:
        copies: False if the content of ``path`` is not needed.
    """
    at = root
    for part in path.relative_to(root).parts if path.is_relative_to(root) else ():
        at /= part
        behind = Path(os.path.realpath(at))
        if not at.is_symlink() or behind.is_relative_to(root):
            continue
        made = at.with_name(f"{PREFIX}{os.getpid()}-{threading.get_ident()}")
        if behind.is_dir():
            made.mkdir()
            link_all(behind, made)
            at.unlink(missing_ok=True)
            try:
                made.rename(at)
            except OSError:  # another rank was faster
                shutil.rmtree(made)
        elif behind.is_file():
            if copies or at != path:
                shutil.copy2(behind, made)
            else:
                made.touch()
            made.replace(at)
