"""Marks directories as written by Evener, and identifies the run of a checkpoint.

Names are no proof: another program may call its directories ``step-00000004`` too, and a user may copy one. So every
checkpoint and every run directory holds a mark, ``evener.json``. Evener removes and replaces only marked directories.

A mark names its run by a random number. A run that resumes from the newest checkpoint of its directory keeps the name.
A run that begins elsewhere, or resumes from an earlier checkpoint, is a new run. Its history says where it branches
off. The mark of the run directory has that history too, so that a run that dies before its first save can be
identified::

    run a    step 4 ── step 6 ── step 8
                         │
    run b                └──── step 7          run b, history: run a up to step 6
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evener.checkpoint.checksums import sum_of, sums_in
from evener.files import read_json, replacing

MARK = "evener.json"
"""Name of the mark file."""
_AUTHOR = "evener"
_LONGEST = 1 << 20


@dataclass(frozen=True)
class Identity:
    """The run of a checkpoint, and the runs that it continues."""

    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """A random name; empty for a checkpoint without a mark."""
    history: tuple[tuple[str, int], ...] = ()
    """Earlier runs that this one continues, each with its last step that counts."""

    def includes(self, run: str, steps: int) -> bool:
        """Returns True if a checkpoint of ``run`` after ``steps`` steps belongs to this training."""
        return run == self.run or any(run == earlier and steps <= last for earlier, last in self.history)

    def knows(self, run: str) -> bool:
        """Returns True if ``run`` is this run, or one that it continues."""
        return self.includes(run, 0)

    def branch(self, steps: int) -> Identity:
        """Returns a new run that continues this one after ``steps`` steps."""
        return Identity(history=(*self.history, (self.run, steps)))

    def as_plain(self) -> dict[str, Any]:
        """Returns the identity as values for JSON."""
        return {"run": self.run, "history": [list(entry) for entry in self.history]}

    @staticmethod
    def from_plain(saved: Mapping[str, Any]) -> Identity:
        """Returns the identity from the result of :meth:`as_plain`.

        Raises:
            KeyError, TypeError, ValueError: If ``saved`` is something else.
        """
        history = tuple((run, last) for run, last in saved["history"])
        texts = all(type(run) is str for run in (saved["run"], *(run for run, _ in history)))
        if not texts or not all(type(last) is int for _, last in history):  # JSON may hold Infinity
            raise ValueError("it names no run, or no step")
        return Identity(saved["run"], history)


UNMARKED = Identity("")
"""Identity of a checkpoint without a mark."""


def write_mark(directory: Path, mark: Mapping[str, Any]) -> None:
    """Marks a directory as Evener's, and syncs the mark to disk. Replaces an existing mark atomically."""
    with replacing(directory / MARK, sync=True) as file:
        file.write(json.dumps({"written_by": _AUTHOR, **mark}).encode())


def mark_in(directory: Path) -> dict[str, Any] | None:
    """Returns the content of a directory's mark, or None if it has none, and so is not Evener's."""
    try:
        found = read_json(directory / MARK, _LONGEST)
    except (OSError, ValueError):
        return None
    named = isinstance(found, dict) and found.get("written_by") == _AUTHOR
    return found if named and isinstance(found.get("run"), str) else None


def identity_in(checkpoint: Path, steps: int) -> Identity | None:
    """Returns the identity of the checkpoint after ``steps`` steps, or None if the directory has no mark of it, or one
    in which a bit has changed: it would be that of another run.

    A copy with the name of another step does not match its mark, and belongs to the user.
    """
    mark = mark_in(checkpoint)
    if mark is None or mark.get("steps") != steps or _is_changed(checkpoint):
        return None
    try:
        return Identity.from_plain(mark)
    except (KeyError, TypeError, ValueError):
        return None


def _is_changed(checkpoint: Path) -> bool:
    """Returns True if the checksums of a checkpoint tell another mark."""
    try:
        wanted = sums_in(checkpoint).get(MARK)
        return wanted is not None and sum_of(checkpoint / MARK) != wanted
    except (OSError, ValueError):
        return False  # what is wrong with the checksums is told where they are compared


def run_in(run_dir: Path) -> Identity | None:
    """Returns the run in a run directory, or None if that has no mark."""
    mark = mark_in(run_dir)
    try:
        return None if mark is None else Identity.from_plain(mark)
    except (KeyError, TypeError, ValueError):
        return None


def lost_mark(checkpoint: Path, steps: int) -> str:
    """Describes what is wrong with the mark of the checkpoint after ``steps`` steps. Returns "" if nothing is."""
    if identity_in(checkpoint, steps) is not None:
        return ""
    if _is_changed(checkpoint):
        return f"{MARK} is not what was written: its checksum differs"
    if os.path.lexists(checkpoint / MARK):
        elsewhere = mark_in(checkpoint) is not None
        return f"{MARK} is not that of step {steps}" if elsewhere else f"{MARK} cannot be read"
    return f"{MARK} cannot be read: it is not there"
