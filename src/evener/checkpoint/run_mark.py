"""Who wrote a directory, and which training a checkpoint is of.

Names are no proof: another program may call its directories ``step-00000004`` too, and a user may copy one. So every
checkpoint holds a mark, ``evener.json``, and so does a run directory. Evener removes and replaces only what has one.

A mark names its run by a random number. A run that goes on from the newest checkpoint of its directory keeps the name.
One that begins elsewhere, or goes on from an earlier checkpoint, is a new run, whose history says where it branches.
The mark of the run directory has that history too, so that a run which dies before its first save is known again::

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

from evener.files import read_json

MARK = "evener.json"
"""The file that tells whose a directory is."""
_AUTHOR = "evener"
_LONGEST = 1 << 20
_SUMS = "sums.json"


@dataclass(frozen=True)
class Identity:
    """The run that a checkpoint is of, and the runs that it continues."""

    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """A random name; empty for checkpoints of versions of Evener that wrote no mark."""
    history: tuple[tuple[str, int], ...] = ()
    """Earlier runs that this one continues, each with its last step that counts."""

    def includes(self, run: str, steps: int) -> bool:
        """Whether a checkpoint of ``run`` after ``steps`` steps belongs to this training."""
        return run == self.run or any(run == earlier and steps <= last for earlier, last in self.history)

    def knows(self, run: str) -> bool:
        """Whether ``run`` is this run, or one that it continues."""
        return self.includes(run, 0)

    def branch(self, steps: int) -> Identity:
        """A new run that continues this one after ``steps`` steps."""
        return Identity(history=(*self.history, (self.run, steps)))

    def as_plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"run": self.run, "history": [list(entry) for entry in self.history]}

    @staticmethod
    def from_plain(saved: Mapping[str, Any]) -> Identity:
        """What :meth:`as_plain` gave.

        Raises:
            KeyError, TypeError, ValueError: If it is something else.
        """
        history = tuple((run, last) for run, last in saved["history"])
        texts = all(type(run) is str for run in (saved["run"], *(run for run, _ in history)))
        if not texts or not all(type(last) is int for _, last in history):  # Infinity too is a number in JSON
            raise ValueError("it names no run, or no step")
        return Identity(saved["run"], history)


UNMARKED = Identity("")
"""Of a checkpoint without a mark."""


def write_mark(directory: Path, mark: Mapping[str, Any]) -> None:
    """Marks a directory as Evener's, on the disk itself; a mark that is there is replaced whole."""
    partial = directory / f".{MARK}.{os.getpid()}"
    with partial.open("w") as file:
        json.dump({"written_by": _AUTHOR, **mark}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(directory / MARK)


def mark_in(directory: Path) -> dict[str, Any] | None:
    """What the mark of a directory says; None if there is no mark, so that the directory is not Evener's."""
    try:
        found = read_json(directory / MARK, _LONGEST)
    except (OSError, ValueError):
        return None
    named = isinstance(found, dict) and found.get("written_by") == _AUTHOR
    return found if named and isinstance(found.get("run"), str) else None


def identity_in(checkpoint: Path, steps: int) -> Identity | None:
    """The identity of the checkpoint after ``steps`` steps; None if the directory carries no mark of one.

    A copy under the name of another step is not what the mark says, and is the user's.
    """
    mark = mark_in(checkpoint)
    if mark is None or mark.get("steps") != steps:
        return None
    try:
        return Identity.from_plain(mark)
    except (KeyError, TypeError, ValueError):
        return None


def run_in(run_dir: Path) -> Identity | None:
    """The run in a run directory; None if that has no mark. A mark of an earlier version knows no history."""
    mark = mark_in(run_dir)
    try:
        return None if mark is None else Identity.from_plain({"history": (), **mark})
    except (KeyError, TypeError, ValueError):
        return None


def lost_mark(checkpoint: Path, steps: int) -> str:
    """What is wrong with the mark of the checkpoint after ``steps`` steps, in words.

    Empty if nothing is, and for a checkpoint of a version that wrote no mark, whose checksums have none of it.
    """
    if identity_in(checkpoint, steps) is not None:
        return ""
    if os.path.lexists(checkpoint / MARK):
        elsewhere = mark_in(checkpoint) is not None
        return f"{MARK} is not that of step {steps}" if elsewhere else f"{MARK} cannot be read"
    try:
        return f"{MARK} cannot be read: it is not there" if MARK in read_json(checkpoint / _SUMS) else ""
    except (OSError, ValueError, TypeError):
        return f"{MARK} and {_SUMS} cannot be read"
