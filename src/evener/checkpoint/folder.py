"""The directory of checkpoints: what they are called, which is the latest and the best, and which may go."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from evener.errors import ConfigurationError

FORMAT = 2
"""Of what is written here; another is refused."""
LATEST, BEST = "latest", "best"
REST = "rest.pt"
_PREFIX = "step-"


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay."""

    last: int = 2
    """So many of the last ones; two, so that there is one before a damaged one."""


def name_of(steps: int) -> str:
    """``step-00000120``."""
    return f"{_PREFIX}{steps:08d}"


def partial_of(target: Path) -> Path:
    """Where a checkpoint is written before it is whole."""
    return target.with_name(f".{target.name}")


def publish(target: Path, keep: Keep) -> None:
    """Makes what was written the latest, and removes what is not kept."""
    partial = partial_of(target)
    if target.exists():  # of the same step: out of the way in no time, to be removed with the others
        target.rename(partial.with_name(f"{partial.name}.{os.getpid()}"))
    partial.rename(target)
    _sync(target.parent)
    point(target.parent / LATEST, target.name)
    _prune(target.parent, target.name, keep)


def point(pointer: Path, name: str) -> None:
    """Has ``latest`` or ``best`` name a checkpoint, in one step."""
    partial = pointer.with_name(f".{pointer.name}.{os.getpid()}")
    with partial.open("w") as file:
        file.write(name + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(pointer)
    _sync(pointer.parent)


def _sync(directory: Path) -> None:
    """What was renamed in it is on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prune(directory: Path, latest: str, keep: Keep) -> None:
    """Also what saves that were broken off have left."""
    others = [path for path in complete(directory) if path.name != latest]
    stays = {latest, named(directory / BEST), *(path.name for path in others[: keep.last - 1])}
    for path in directory.glob(f"*{_PREFIX}*"):
        if path.name not in stays:
            shutil.rmtree(path, ignore_errors=True)


def complete(directory: Path) -> list[Path]:
    """The checkpoints of a directory, the latest first and then those before it.

    Later ones than the latest are of a run that was gone on with from an earlier one: of a history that was left.
    """
    found = sorted((path for path in directory.glob(f"{_PREFIX}*") if (path / REST).is_file()), reverse=True)
    latest = named(directory / LATEST)
    return [path for path in found if not latest or path.name <= latest]


def named(pointer: Path) -> str:
    """The checkpoint that ``latest`` or ``best`` names; empty if there is no such pointer."""
    try:
        return pointer.read_text().strip()
    except OSError:
        return ""


def candidates(path: Path) -> list[Path]:
    """What may be meant by a run directory, a directory of checkpoints, one of these, or a pointer, best first.

    Raises:
        ConfigurationError: If there is none.
    """
    if (path / REST).is_file():
        return [path]
    if path.name in (LATEST, BEST) and path.is_file():
        own = path.parent / named(path)
        return [own] if path.name == BEST else complete(path.parent) or [own]
    for directory in (path, path / "checkpoints"):
        if found := complete(directory):
            return found
    raise ConfigurationError(f"no checkpoint at {path}: there is no {path / 'checkpoints' / LATEST}")


# The best


def best_value(directory: Path) -> float | None:
    """Of the metric by which the best checkpoint was chosen; None if there is none yet."""
    try:
        return float(json.loads((directory / f"{BEST}.json").read_text())["value"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def mark_best(directory: Path, name: str, metric: str, value: float) -> None:
    """Keeps the checkpoint ``name`` until another one is better."""
    partial = directory / f".{BEST}.json.{os.getpid()}"
    partial.write_text(json.dumps({"checkpoint": name, "metric": metric, "value": value}) + "\n")
    partial.replace(directory / f"{BEST}.json")
    point(directory / BEST, name)
