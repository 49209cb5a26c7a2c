"""The directory of checkpoints: what they are called, which is the latest and the best, and which may go."""

from __future__ import annotations

import json
import os
import re
import uuid
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from evener.checkpoint.identity import MARK, UNMARKED, Identity, identity_in, mark_in
from evener.errors import CheckpointError, ConfigurationError
from evener.guarded_files import read_json, read_text
from evener.texts import few

FORMAT = 2
"""Of what is written here; another is refused."""
LATEST, BEST = "latest", "best"
REST = "rest.pt"
EVALUATION = "evaluation.json"
CHECKPOINTS = "checkpoints"
"""The directory of checkpoints in a run directory."""
_PREFIX = "step-"
_LONGEST_NAME = 1000
_NAME = re.compile(rf"{_PREFIX}(\d{{8,}})")
_PARTIAL = re.compile(rf"\.{_PREFIX}(\d{{8,}})(\.\w+)?")


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay."""

    last: int = 2
    """So many of the last ones; two, so that there is one before a damaged one."""


@dataclass(frozen=True)
class Saved:
    """The directory of a checkpoint."""

    path: Path
    steps: int
    identity: Identity
    marked: bool
    """Whether it carries Evener's mark; only then may it be removed."""


def name_of(steps: int) -> str:
    """``step-00000120``."""
    return f"{_PREFIX}{steps:08d}"


def partial_of(target: Path) -> Path:
    """Where a checkpoint is written before it is whole."""
    return target.with_name(f".{target.name}")


# What is there


def saved_in(directory: Path) -> list[Saved]:
    """The checkpoints of a directory, of whatever run, the last steps first.

    One that lacks a file is among them, so that whoever passes it over can say so.
    """
    latest = named(directory / LATEST)
    found = []
    for path in directory.glob(f"{_PREFIX}*"):
        match = _NAME.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        identity = identity_in(path, int(match[1]))
        if identity is not None or (path / REST).is_file() or path.name == latest:
            entry = Saved(path, int(match[1]), identity or UNMARKED, identity is not None)
            found.append(entry)
    return sorted(found, key=lambda each: each.steps, reverse=True)


def own_of(saved: Sequence[Saved], latest: str) -> list[Saved]:
    """Those of one training: the latest first and then those before it.

    Later ones than the latest are of a history that was left, and others of another run.

    Args:
        latest: The name of the latest, whose training it is; where that is none of them, the training to which all
            belong.

    Raises:
        ConfigurationError: If that cannot be known.
    """
    head = next((each for each in saved if each.path.name == latest), None)
    if head is None and saved:
        head = next((each for each in saved if all(_includes(each.identity, other) for other in saved)), None)
        if head is None:
            raise ConfigurationError(
                f"{saved[0].path.parent} has checkpoints of several runs, and its file {LATEST} names none of them: "
                f"name one of {few([each.path.name for each in saved])} yourself"
            )
    if head is None:
        return []
    return [each for each in saved if each.steps <= head.steps and _includes(head.identity, each)]


def _includes(identity: Identity, other: Saved) -> bool:
    return identity.includes(other.identity.run, other.steps)


def complete(directory: Path) -> list[Path]:
    """The checkpoints of the last run in a directory, the latest first and then those before it.

    Empty if that run has saved none yet: those of an earlier one are not taken for its own.

    Raises:
        ConfigurationError: If it cannot be known which run they are of.
    """
    mark = mark_in(directory.parent) if directory.name == CHECKPOINTS else None
    found = own_of(saved_in(directory), named(directory / LATEST))
    is_own = bool(found) and (mark is None or found[0].identity.knows(mark["run"]))
    return [each.path for each in found] if is_own else []


def named(pointer: Path) -> str:
    """The checkpoint that ``latest`` or ``best`` names; empty if there is no such pointer."""
    try:
        name = read_text(pointer, _LONGEST_NAME).strip()
    except (OSError, ValueError):
        return ""
    return "" if "/" in name or "\0" in name or name == ".." else name


def candidates(path: Path) -> list[Path]:
    """What may be meant by a run directory, a directory of checkpoints, one of these, or a pointer, best first.

    Raises:
        ConfigurationError: If there is none.
    """
    if _is_checkpoint(path):
        return [path]
    if path.name == BEST and path.is_file():
        return [_best_in(path.parent)]
    places = [path.parent] if path.name == LATEST and path.is_file() else [path, path / CHECKPOINTS]
    for directory in places:
        if found := complete(directory):
            return found
    others = [each.path for directory in places for each in saved_in(directory)]
    if others:
        raise ConfigurationError(
            f"no checkpoint at {path}: the run there has saved none yet. Those in {others[0].parent} are of an earlier "
            f"run: name one of them to go on from it ({few([other.name for other in others])})"
        )
    raise ConfigurationError(f"no checkpoint at {path}: there is no {path / CHECKPOINTS / LATEST}")


def _best_in(directory: Path) -> Path:
    own = directory / named(directory / BEST)
    if own not in (each.path for each in saved_in(directory)):
        raise ConfigurationError(f"{directory / BEST} names {own.name!r}, and no such checkpoint is there")
    return own


def is_by_directory(path: Path) -> bool:
    """Whether the path names a directory of checkpoints, or its latest, rather than one of them."""
    return path.name != BEST and not _is_checkpoint(path)


def _is_checkpoint(path: Path) -> bool:
    return (path / REST).is_file() or (_NAME.fullmatch(path.name) is not None and mark_in(path) is not None)


def lost_latest(directory: Path) -> str:
    """In words, that ``latest`` names no checkpoint that is there; empty if it does, or does not exist."""
    pointer = directory / LATEST
    name = named(pointer)
    if not os.path.lexists(pointer) or (_NAME.fullmatch(name) and (directory / name).is_dir()):
        return ""
    return f"{pointer} names {name!r}, and no such checkpoint is there"


# What is written, and what goes


def refuse_foreign(directory: Path) -> None:
    """Raises ConfigurationError if something of another program has a name that a checkpoint or pointer will need."""
    if directory.is_symlink() and not directory.exists():
        raise ConfigurationError(
            f"{directory} is a symbolic link to {os.readlink(directory)}, which is not there: make that directory, or "
            "remove the link"
        )
    if not directory.is_dir():
        return
    known = [each.path for each in saved_in(directory)]
    alike = [path for path in directory.glob(f"{_PREFIX}*") if _NAME.fullmatch(path.name)]
    strange = [path.name for path in (*alike, *foreign_pointers(directory)) if path not in known]
    if strange:
        raise ConfigurationError(
            f"{directory} has {few(sorted(strange))}, which is not of Evener and has a name that a checkpoint will "
            "need: move it away, or choose another directory"
        )


def foreign_pointers(directory: Path) -> list[Path]:
    """Files with the names of pointers that are not of Evener: none of its checkpoints is there, and they name none."""
    if any(each.marked for each in saved_in(directory)):
        return []
    pointers = (directory / LATEST, directory / BEST)
    return [path for path in pointers if os.path.lexists(path) and not _NAME.fullmatch(named(path))]


def publish(target: Path, keep: Keep) -> None:
    """Makes what was written the latest, and removes what is not kept.

    Raises:
        CheckpointError: If something that is not of Evener has the checkpoint's name.
    """
    partial = partial_of(target)
    if os.path.lexists(target):  # of the same step: out of the way in no time, to be removed with the others
        refuse_to_replace(target)
        target.rename(partial.with_name(f"{partial.name}.{uuid.uuid4().hex}"))
    partial.rename(target)
    _sync(target.parent)
    point(target.parent / LATEST, target.name)
    _prune(target, keep)


def refuse_to_replace(*checkpoints: Path) -> None:
    """Raises CheckpointError for something without Evener's mark, and for a pointer of another program."""
    foreign = [path for path in checkpoints if os.path.lexists(path) and not is_marked(path)]
    for path in (*foreign, *foreign_pointers(checkpoints[0].parent)):
        raise CheckpointError(f"{path} is there and is not of Evener: move it away")


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


def _prune(target: Path, keep: Keep) -> None:
    """Removes what is not kept; also what saves that were broken off have left.

    Checkpoints of an earlier run go when this one has as many of its own as are kept.
    """
    directory = target.parent
    marked = [each for each in saved_in(directory) if each.marked]
    own = own_of(marked, target.name)
    others = [each for each in marked if each not in own]
    stays = {each.path.name for each in (own + others)[: keep.last]}
    stays |= {each.path.name for each in own if each.path.name == named(directory / BEST)}
    for path in directory.glob(f"*{_PREFIX}*"):
        if path.name not in stays and is_marked(path):
            remove(path)
    if not os.path.lexists(directory / named(directory / BEST)):
        (directory / BEST).unlink(missing_ok=True)


def is_marked(path: Path) -> bool:
    """Whether Evener wrote this directory under this name, as a checkpoint or for a save that was broken off."""
    match = _NAME.fullmatch(path.name) or _PARTIAL.fullmatch(path.name)
    return match is not None and not path.is_symlink() and identity_in(path, int(match[1])) is not None


def is_of(path: Path, identity: Identity) -> bool:
    """Whether a checkpoint is there, complete, and was written by this very run."""
    match = _NAME.fullmatch(path.name)
    found = identity_in(path, int(match[1])) if match else None
    return found is not None and found.run == identity.run


_OWN_FILES = (REST, "sums.json", EVALUATION, "tensors.json", ".metadata", ".metadata.tmp")


def remove(checkpoint: Path) -> None:
    """Removes a checkpoint that carries Evener's mark: its own files, and the directory if it holds no more.

    The mark goes last, so that a removal that is broken off is completed by the next.
    """
    with suppress(OSError):
        gone = checkpoint
        if _NAME.fullmatch(checkpoint.name):
            gone = checkpoint.rename(
                partial_of(checkpoint).with_name(f".{checkpoint.name}.{uuid.uuid4().hex}")
            )
        torn = [path for name in (*_OWN_FILES, MARK) for path in gone.glob(f".{name}.*")]
        for path in (*gone.glob("__*.distcp"), *(gone / name for name in _OWN_FILES), *torn, gone / MARK):
            path.unlink(missing_ok=True)
        if any(gone.iterdir()):  # files of the user's
            gone.rename(checkpoint)
        else:
            gone.rmdir()


def clear(directory: Path) -> None:
    """Removes all checkpoints that carry Evener's mark, and the pointers to them."""
    for path in directory.glob(f"*{_PREFIX}*"):
        if is_marked(path):
            remove(path)
    for pointer in (LATEST, BEST):
        if _NAME.fullmatch(named(directory / pointer)):
            (directory / pointer).unlink()


# What came after a checkpoint, at the same step


def write_evaluation(checkpoint: Path, kept: str) -> None:
    """Adds to a checkpoint what is remembered after the evaluation of its weights."""
    partial = checkpoint / f".{EVALUATION}.{os.getpid()}"
    partial.write_text(json.dumps({"crc32": zlib.crc32(kept.encode()), "kept": kept}) + "\n")
    partial.replace(checkpoint / EVALUATION)


def evaluation_of(checkpoint: Path) -> str | None:
    """What :func:`write_evaluation` wrote; None if that is not there, or damaged, so that it has to be done again."""
    try:
        found = read_json(checkpoint / EVALUATION)
        kept: str = found["kept"]
        return kept if zlib.crc32(kept.encode()) == found["crc32"] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


# The best


def mark_best(directory: Path, name: str, metric: str, value: float) -> None:
    """Keeps the checkpoint ``name`` until another one is better."""
    partial = directory / f".{BEST}.json.{os.getpid()}"
    partial.write_text(json.dumps({"checkpoint": name, "metric": metric, "value": value}) + "\n")
    partial.replace(directory / f"{BEST}.json")
    point(directory / BEST, name)


def forget_best(directory: Path) -> None:
    """There is no best checkpoint any more, or not yet."""
    if _NAME.fullmatch(named(directory / BEST)):
        (directory / BEST).unlink()
        (directory / f"{BEST}.json").unlink(missing_ok=True)
