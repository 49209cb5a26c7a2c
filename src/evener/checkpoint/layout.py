"""The directory of checkpoints: names, the pointers to the latest and the best, and which may be removed."""

from __future__ import annotations

import math
import os
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from evener.checkpoint.checksums import NAME, SUMS
from evener.checkpoint.run_mark import MARK, UNMARKED, Identity, identity_in, lost_mark, mark_in, run_in
from evener.core.elsewhere import shown
from evener.core.text import few
from evener.errors import CheckpointError, ConfigurationError
from evener.files import read_json, read_text, replacing

FORMAT = 2
"""Format that is written here; any other is refused."""
LATEST, BEST = "latest", "best"
BEST_VALUE = "best.json"
REST = "rest.pt"
EVALUATION = "evaluation.json"
DAMAGED = "damaged-"
"""Prefix for a checkpoint with a damaged mark when a new one of the same step takes its place."""
CHECKPOINTS = "checkpoints"
"""The directory of checkpoints in a run directory."""
_PREFIX = "step-"
_LONGEST_NAME = 1000
STEP = re.compile(rf"{_PREFIX}([0-9]{{8,20}})")
"""Names of checkpoints."""
_PARTIAL = re.compile(rf"\.{_PREFIX}([0-9]{{8,20}})(\.[0-9a-f]{{32}})?")
_PARTIAL_MARK = re.compile(rf"\.{re.escape(MARK)}\.[0-9]+")


@dataclass(frozen=True)
class Keep:
    """Which checkpoints are kept."""

    last: int = 2
    """Number of latest checkpoints to keep. Two, so that there is one before a damaged one."""


@dataclass(frozen=True)
class CheckpointDirectory:
    """The directory of a checkpoint."""

    path: Path
    steps: int
    identity: Identity
    marked: bool
    """True if it carries Evener's mark; only then may it be removed."""
    torn: bool = False
    """True if its mark is damaged, so that its run is unknown. Such a checkpoint is reported and skipped."""


def name_of(steps: int) -> str:
    """Returns the directory name of a checkpoint, such as ``step-00000120``."""
    return f"{_PREFIX}{steps:08d}"


def partial_of(target: Path) -> Path:
    """Returns the path where a checkpoint is written before it is whole."""
    return target.with_name(f".{target.name}")


def fresh_partial_of(target: Path) -> Path:
    """Returns a path like :func:`partial_of` with a new, unique name."""
    return target.with_name(f".{target.name}.{uuid.uuid4().hex}")


# What is there


def saved_in(directory: Path) -> list[CheckpointDirectory]:
    """Returns the checkpoints in a directory, of any run, latest step first.

    Includes checkpoints that lack a file, so that the caller can report skipping them.
    """
    latest = named(directory / LATEST)
    found = []
    for path in directory.glob(f"{_PREFIX}*"):
        match = STEP.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        steps = int(match[1])
        identity = identity_in(path, steps)
        torn = identity is None and _is_torn(path)
        if identity is not None or torn or (path / REST).is_file() or path.name == latest:
            found.append(CheckpointDirectory(path, steps, identity or UNMARKED, identity is not None, torn))
    return sorted(found, key=lambda each: each.steps, reverse=True)


def wrong_mark(path: Path) -> str:
    """Describes what is wrong with the mark of a checkpoint directory. Returns "" if nothing is."""
    match = STEP.fullmatch(path.name)
    return lost_mark(path, int(match[1])) if match else ""


def _is_torn(path: Path) -> bool:
    """Returns True if a directory is a checkpoint of Evener, by its other files, whose mark is damaged."""
    return any(os.path.lexists(path / name) for name in (MARK, REST)) and bool(wrong_mark(path))


def own_of(
    saved: Sequence[CheckpointDirectory], latest: str, run: Identity | None = None
) -> list[CheckpointDirectory]:
    """Returns the checkpoints of one training, the latest first.

    Checkpoints after the latest belong to an abandoned history, and others to other runs. Those with damaged marks do
    not tell their run: they are included, but decide nothing. ::

        latest     damaged     step 4 ── step 6 ── step 8 ?    8, 6, 4: whoever reads them passes 8 over
        latest     of `run`    step 4 ── step 6 ── step 8      8, 6, 4
        run        branched    step 4 ── step 6 ── step 8      6, 4: it begins there, and has saved none yet
                                           └── run

    Args:
        latest: Name of the latest checkpoint, which decides the training. If it is not among them, the training is the
            one to which all belong.
        run: The run to which they must belong; None if any will do.

    Raises:
        ConfigurationError: If the training cannot be determined.
    """
    known = [each for each in saved if not each.torn and (run is None or _belongs(each, run))]
    head = next((each for each in saved if each.path.name == latest and (each.torn or each in known)), None)
    last = head.steps if head is not None else math.inf
    if head is None or head.torn:
        known = [each for each in known if each.steps <= last]
        head = next((each for each in known if all(_includes(each.identity, other) for other in known)), None)
        if head is None and known:
            raise ConfigurationError(
                f"{known[0].path.parent} has checkpoints of several runs, and its file {LATEST} does not tell which of "
                f"these to go on with: name one of {few([each.path.name for each in known])} yourself"
            )
    own = [each for each in known if head is not None and _includes(head.identity, each)]
    return [each for each in saved if each.steps <= last and (each.torn or each in own)]


def _includes(identity: Identity, other: CheckpointDirectory) -> bool:
    return identity.includes(other.identity.run, other.steps)


def _belongs(each: CheckpointDirectory, run: Identity) -> bool:
    return _includes(run, each) or each.identity.knows(run.run)


def complete(directory: Path) -> list[Path]:
    """Returns the checkpoints of the last run in a directory, latest first.

    Empty if that run has saved none. Checkpoints of an earlier run that it does not continue are not its own.

    Raises:
        ConfigurationError: If it cannot be known which run they belong to.
    """
    return [each.path for each in own_of(saved_in(directory), named(directory / LATEST), _run_of(directory))]


def _run_of(directory: Path) -> Identity | None:
    """Returns the run in the run directory of a directory of checkpoints; None if it has no mark."""
    return run_in(directory.parent) if directory.name == CHECKPOINTS else None


def continued(checkpoint: Path, steps: int, identity: Identity) -> Identity:
    """Returns the identity of the run that resumes from the newest checkpoint of a directory.

    It is that of the checkpoint, or of a run that resumed from it before and has saved nothing yet.
    """
    run = _run_of(checkpoint.parent)
    return run if run is not None and run.history[-1:] == ((identity.run, steps),) else identity


def named(pointer: Path) -> str:
    """Returns the name of the checkpoint in the file ``latest`` or ``best``, or "" if there is no such pointer."""
    try:
        name = read_text(pointer, _LONGEST_NAME).strip()
    except (OSError, ValueError):
        return ""
    return "" if "/" in name or "\0" in name or name == ".." else name


def names_one(pointer: Path) -> bool:
    """Returns True if ``latest`` or ``best`` names something that may be a checkpoint."""
    return STEP.fullmatch(named(pointer)) is not None


def candidates(path: Path) -> list[Path]:
    """Returns the checkpoints that ``path`` may mean, best first.

    ``path`` is a run directory, a directory of checkpoints, one checkpoint, or a pointer.

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
            f"no checkpoint at {shown(path)}: the run there has saved none yet. Those in {others[0].parent} are of an "
            f"earlier run: name one of them to go on from it ({few([other.name for other in others])})"
        )
    ended = (
        "the run there ended before it saved one: begin it anew, without --resume (--save-every saves sooner)"
    )
    words = f"there is no {shown(path / CHECKPOINTS / LATEST)}" if run_in(path) is None else ended
    raise ConfigurationError(f"no checkpoint at {shown(path)}: {words}")


def _best_in(directory: Path) -> Path:
    own = directory / named(directory / BEST)
    if own not in (each.path for each in saved_in(directory)):
        raise ConfigurationError(f"{directory / BEST} names {own.name!r}, and no such checkpoint is there")
    return own


def is_by_directory(path: Path) -> bool:
    """Returns True if the path names a directory of checkpoints, or its latest, rather than one of them."""
    return path.name != BEST and not _is_checkpoint(path)


def _is_checkpoint(path: Path) -> bool:
    return (path / REST).is_file() or (STEP.fullmatch(path.name) is not None and mark_in(path) is not None)


def lost_latest(directory: Path) -> str:
    """Describes a pointer ``latest`` to a missing checkpoint. Returns "" if it is right, or does not exist."""
    pointer = directory / LATEST
    name = named(pointer)
    if not os.path.lexists(pointer) or (STEP.fullmatch(name) and (directory / name).is_dir()):
        return ""
    return f"{pointer} names {name!r}, and no such checkpoint is there"


# What is written, and what goes


def refuse_unwritable(directory: Path) -> None:
    """Raises ConfigurationError if no checkpoint can be written to the directory, whatever it contains."""
    if directory.is_symlink() and not directory.exists():
        raise ConfigurationError(
            f"{directory} is a symbolic link to {os.readlink(directory)}, which is not there: make that directory, or "
            "remove the link"
        )
    latest = directory / LATEST
    wrong = f"{latest} is a directory" if latest.is_dir() and not latest.is_symlink() else ""
    wrong = f"{directory} is no directory" if directory.exists() and not directory.is_dir() else wrong
    if wrong:
        raise ConfigurationError(f"{wrong}, so that no checkpoint can be saved: move it away, or use another")


def refuse_foreign(directory: Path) -> None:
    """Raises ConfigurationError if another program's file has a name that a checkpoint or pointer will need."""
    if not directory.is_dir():
        return
    known = [each.path for each in saved_in(directory)]
    alike = [path for path in directory.glob(f"{_PREFIX}*") if STEP.fullmatch(path.name)]
    pointers = foreign_pointers(directory) + foreign_value(directory)
    strange = [path.name for path in (*alike, *pointers) if path not in known]
    if strange:
        raise ConfigurationError(
            f"{directory} has {few(sorted(strange))}, which is not of Evener and has a name that a checkpoint will "
            "need: move it away, or choose another directory"
        )


def foreign_pointers(directory: Path) -> list[Path]:
    """Returns files named like pointers that are not Evener's: they name no checkpoint, and no marked one exists."""
    if any(each.marked for each in saved_in(directory)):
        return []
    pointers = (directory / LATEST, directory / BEST)
    return [path for path in pointers if os.path.lexists(path) and not names_one(path)]


def foreign_value(directory: Path) -> list[Path]:
    """Returns the file named like the one with the best value, if it is not Evener's; otherwise nothing."""
    path = directory / BEST_VALUE
    if not os.path.lexists(path) or names_one(directory / BEST):
        return []
    try:
        own = STEP.fullmatch(read_json(path)["checkpoint"]) is not None
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        own = False
    return [] if own else [path]


def publish(target: Path, keep: Keep) -> None:
    """Makes a written checkpoint the latest, and removes those that are not kept.

    Raises:
        CheckpointError: If something that is not Evener's has the checkpoint's name.
    """
    if os.path.lexists(target):  # of the same step: renamed at once, removed later with the others
        refuse_to_replace(target)
        aside = target.with_name(f"{DAMAGED}{target.name}-{uuid.uuid4().hex[:8]}")
        target.rename(fresh_partial_of(target) if is_marked(target) else aside)
    partial_of(target).rename(target)
    _sync(target.parent)
    point(target.parent / LATEST, target.name)
    _prune(target, keep)


def refuse_to_replace(*checkpoints: Path) -> None:
    """Raises CheckpointError if one of the checkpoints, or a pointer beside them, exists and is not Evener's."""
    foreign = [path for path in checkpoints if os.path.lexists(path) and not _is_ours(path)]
    for path in (*foreign, *foreign_pointers(checkpoints[0].parent)):
        raise CheckpointError(f"{path} is there and is not of Evener: move it away")


def _is_ours(path: Path) -> bool:
    """Returns True if a path may be moved away: to be removed if it is marked, to be kept if its mark is damaged."""
    return is_marked(path) or _is_unmarked_partial(path) or (_is_torn(path) and not path.is_symlink())


def _is_unmarked_partial(path: Path) -> bool:
    """Returns True for a directory of a save that died before it wrote the mark."""
    is_partial = _PARTIAL.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    return bool(is_partial) and all(_PARTIAL_MARK.fullmatch(file.name) for file in path.iterdir())


def point(pointer: Path, name: str) -> None:
    """Makes ``latest`` or ``best`` name a checkpoint, atomically."""
    with replacing(pointer, sync=True) as file:
        file.write(f"{name}\n".encode())
    _sync(pointer.parent)


def _sync(directory: Path) -> None:
    """Syncs renames in a directory to disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prune(target: Path, keep: Keep) -> None:
    """Removes checkpoints that are not kept, and remains of interrupted saves.

    Checkpoints of an earlier run are removed when this run has as many of its own as are kept.
    """
    directory = target.parent
    marked = [each for each in saved_in(directory) if each.marked]
    own = own_of(marked, target.name)
    others = [each for each in marked if each not in own]
    stays = {each.path.name for each in (own + others)[: keep.last]}
    stays |= {each.path.name for each in own if each.path.name == named(directory / BEST)}
    for path in directory.glob(f"*{_PREFIX}*"):
        if path.name not in stays and (is_marked(path) or _is_unmarked_partial(path)):
            remove(path)
    if not os.path.lexists(directory / named(directory / BEST)):
        (directory / BEST).unlink(missing_ok=True)


def is_marked(path: Path) -> bool:
    """Returns True if Evener wrote this directory under this name, as a checkpoint or in an interrupted save."""
    match = STEP.fullmatch(path.name) or _PARTIAL.fullmatch(path.name)
    return match is not None and not path.is_symlink() and identity_in(path, int(match[1])) is not None


_OWN_FILE = re.compile(rf"({NAME.pattern}|{re.escape(SUMS)}|\.metadata\.tmp)|\.({NAME.pattern})\.[0-9]+")
"""Names of the files in a checkpoint that Evener writes, whole or for a moment."""


def remove(checkpoint: Path) -> None:
    """Removes a marked checkpoint: Evener's files, and the directory if nothing else is in it. The mark goes last, so
    that the next removal completes an interrupted one."""
    with suppress(OSError):
        gone = checkpoint
        if STEP.fullmatch(checkpoint.name):
            gone = checkpoint.rename(fresh_partial_of(checkpoint))
        own = [path for path in gone.iterdir() if _OWN_FILE.fullmatch(path.name)]
        for path in sorted(own, key=lambda path: path.name == MARK):
            path.unlink(missing_ok=True)
        if any(gone.iterdir()):  # the user's own files
            gone.rename(checkpoint)
        else:
            gone.rmdir()


def clear(directory: Path) -> None:
    """Removes all checkpoints with Evener's mark, and the pointers to them, also damaged ones."""
    # Asked while the checkpoints are there, by which damaged pointers are known as Evener's.
    foreign = (*foreign_pointers(directory), *foreign_value(directory))
    for path in directory.glob(f"*{_PREFIX}*"):
        if is_marked(path) or _is_unmarked_partial(path):
            remove(path)
    for pointer in (directory / LATEST, directory / BEST, directory / BEST_VALUE):
        if pointer not in foreign and (pointer.is_symlink() or not pointer.is_dir()):
            pointer.unlink(missing_ok=True)
