"""Adds the results of an evaluation to checkpoints: the state kept after it, and which checkpoint is the best."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from evener.checkpoint.layout import (
    BEST,
    BEST_VALUE,
    EVALUATION,
    foreign_value,
    name_of,
    named,
    names_one,
    point,
    wrong_mark,
)
from evener.checkpoint.run_mark import Identity, identity_in, mark_in
from evener.checkpoint.structure import is_kept
from evener.core.os_errors import os_error_message
from evener.errors import CheckpointError
from evener.files import read_json, replace_text


def is_of(checkpoint: Path, identity: Identity) -> bool:
    """Returns True if a checkpoint exists, is complete, and was written by this very run."""
    found = mark_in(checkpoint)
    return found is not None and found["run"] == identity.run and not wrong_mark(checkpoint)


def write_evaluation(checkpoint: Path, kept: str) -> None:
    """Adds the state after the evaluation of its weights to a checkpoint."""
    text = json.dumps({"crc32": zlib.crc32(kept.encode()), "kept": kept})
    replace_text(checkpoint / EVALUATION, text + "\n")


def evaluation_of(checkpoint: Path) -> str | None:
    """Returns what :func:`write_evaluation` wrote. Returns None if it is missing or damaged: then evaluate again."""
    try:
        found = read_json(checkpoint / EVALUATION)
        kept: str = found["kept"]
        return kept if zlib.crc32(kept.encode()) == found["crc32"] and is_kept(kept) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


# The best


def mark_best(directory: Path, name: str, metric: str, value: float) -> None:
    """Keeps the checkpoint ``name`` until another one is better.

    Raises:
        CheckpointError: If it cannot be written down, or another program's file has the name of that with the value.
    """
    for path in foreign_value(directory):
        raise CheckpointError(f"{path} is there and is not of Evener: move it away")
    text = json.dumps({"checkpoint": name, "metric": metric, "value": value})
    try:
        replace_text(directory / BEST_VALUE, text + "\n")
        point(directory / BEST, name)
    except OSError as error:
        raise CheckpointError(f"the best checkpoint cannot be noted: {os_error_message(error)}") from error


def recall_best(directory: Path, steps: int, metric: str, value: float, run: Identity) -> None:
    """Makes ``best`` name the checkpoint that a run remembers as its best, if it names another and that one is there.

    A run that dies when it has saved its best checkpoint, and before the pointer is written, leaves it to the next one.

    Raises:
        CheckpointError: If :func:`mark_best` raises it.
    """
    name = name_of(steps)
    found = identity_in(directory / name, steps) if named(directory / BEST) != name else None
    if found is not None and run.includes(found.run, steps):
        mark_best(directory, name, metric, value)


def forget_best(directory: Path) -> None:
    """Removes the pointer to the best checkpoint."""
    if names_one(directory / BEST):
        for path in (directory / BEST, *([] if foreign_value(directory) else [directory / BEST_VALUE])):
            path.unlink(missing_ok=True)
