"""Saves and loads a prepared loop, for any number of ranks. The file is written once, whole or not at all."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from evener.checkpoint.archive import check_archive
from evener.checkpoint.structure import is_count, is_named
from evener.core.os_errors import os_error_behind, os_error_message
from evener.core.plain_values import as_plain, unreadable
from evener.core.text import few, printable, said
from evener.errors import CheckpointError, ConfigurationError, DataError
from evener.files import open_regular, replacing
from evener.training.prepare.batch import batches_of
from evener.training.prepare.loop_state import LoopState
from evener.training.prepare.prepare import current

_FORMAT = "evener.training.prepare 1"


def save(path: str | os.PathLike[str], **objects: Any) -> None:
    """Writes models, optimizers, schedulers, loaders, other objects with a ``state_dict``, and plain values by name.

    All ranks must call this together: rank 0 writes, and all continue when the file is complete. An earlier file of
    this name stays until then.

    Raises:
        CheckpointError: If the file could not be written; on all ranks.
        ConfigurationError: If another rank is elsewhere in the loop, or has made other updates.
        DivergenceError: If ranks hold different weights or buffers; nothing is written then.
    """
    place = current("evener.save")
    rows = place.exchange("evener.save", place.replicas.checksum(place.learner))
    place.mean.settle()
    place.replicas.compare([row[0] for row in rows], place.session, place.steps)
    _watch_optimizers(objects, place)
    states = {name: thing.state_dict() for name, thing in objects.items() if hasattr(thing, "state_dict")}
    values = {name: thing for name, thing in objects.items() if name not in states}
    message = place.session.control.broadcast_object(
        _written(Path(path), states, values, place) if place.rank == 0 else ""
    )
    if message:
        raise CheckpointError(
            f"{path} could not be written on rank 0: {message}; what was there before is as it was"
        )


def load(path: str | os.PathLike[str], **objects: Any) -> dict[str, Any]:
    """Restores objects from what :func:`save` wrote under their names. Returns the plain values.

    All ranks must call this together: rank 0 reads, and sends the content to the others.

    Raises:
        ConfigurationError: If an object was not saved under its name, or does not fit, or if another rank is elsewhere
            in the loop.
        DataError: If there is no such file, or it is damaged; on all ranks.
    """
    place = current("evener.load")
    place.exchange("evener.load")
    found, message = place.session.control.broadcast_object(_read(Path(path)) if place.rank == 0 else None)
    if message:
        raise DataError(message)
    states, values = found["states"], found["values"]
    place.later.forget()
    _watch_optimizers(objects, place)
    for name in objects:
        if name not in states:
            listed = printable(few([*states, *values]))
            raise ConfigurationError(f"{path} has no {name!r}; it has {listed}")
    for name, thing in objects.items():
        try:
            thing.load_state_dict(states[name])
            if isinstance(thing, torch.optim.Optimizer):
                _check_kind(thing)
                place.division.lay_out_state(thing)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            message = _of_other_kind(thing) or printable(said(error))
            raise ConfigurationError(f"{name} does not go on from {path}: {message}") from error
    place.random.load_state(found["random"])
    place.steps = found["steps"]
    if found.get("batches") is not None:
        batches_of(place).load_state_dict(found["batches"])
    return dict(values)


def _check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for an optimizer that has loaded the groups of one of another kind."""
    if words := _of_other_kind(optimizer):
        raise ValueError(words)


def _of_other_kind(thing: Any) -> str:
    """Says what an optimizer lacks whose groups were loaded; "" if nothing, or if it is none. What a later version of
    its class has added is not missing: the class fills it in."""
    groups = thing.param_groups if isinstance(thing, torch.optim.Optimizer) else ()
    missing = [key for group in groups for key in thing.defaults if key not in group]
    if not missing:
        return ""
    return (
        f"it was saved of an optimizer of another kind, which has no {missing[0]!r}, and this one is "
        f"{type(thing).__name__}: go on with the one before, or leave it out of evener.load"
    )


def _watch_optimizers(objects: dict[str, Any], place: LoopState) -> None:
    """Makes states whole or cuts them also of optimizers that the loop has not given to prepare."""
    for thing in objects.values():
        if isinstance(thing, torch.optim.Optimizer):
            place.division.watch(thing)


def _written(path: Path, states: dict[str, Any], values: dict[str, Any], place: LoopState) -> str:
    """Writes the file. Returns an error message, or "" if it was written."""
    found = {
        "format": _FORMAT,
        "states": as_plain(states),
        "values": as_plain(values),
        "steps": place.steps,
        "random": place.random.held(),
        "batches": None if place.batches is None else place.batches.state_dict(),
    }
    if strange := unreadable(found["states"] | found["values"]):
        return strange
    try:
        os.stat(path.parent)  # a missing directory is an error, and not made
        with replacing(path, follow=True, sync=True) as file, _with_checksums():
            torch.save(found, file)
    except (OSError, RuntimeError, pickle.PicklingError, AttributeError, TypeError) as error:
        cause = os_error_behind(error)
        return f"{type(error).__name__}: {error}" if cause is None else os_error_message(cause)
    return ""


@contextmanager
def _with_checksums() -> Iterator[None]:
    """Has PyTorch write the checksum of each part in the block, also if the user has turned that off."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """Returns the content of the file, and an error message or "". PyTorch itself does not compare checksums."""
    try:
        with open_regular(path) as file:
            check_archive(file)
            if zipfile.is_zipfile(file) and (torn := zipfile.ZipFile(file).testzip()):
                return {}, f"{path} is damaged: its part {printable(torn)} is not what was written"
            file.seek(0)
            found = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return {}, f"there is no file {path} on rank 0: write one with evener.save"
    except Exception as error:  # any kind of error: a damaged file may look like anything
        first = (said(error).splitlines() or [""])[0]
        return {}, f"{path} cannot be read, it is damaged or no file of evener.save: {printable(first)}"
    if not isinstance(found, dict) or found.get("format") != _FORMAT or not found.keys() >= _PARTS.keys():
        return {}, f"{path} was not written by evener.save of this version"
    wrong = [name for name, check in _PARTS.items() if not check(found[name])]
    if found.get("batches") is not None and not _is_batches(found["batches"]):
        wrong.append("batches")
    if wrong:
        return {}, f"{path} is damaged, or no file of evener.save: its {', '.join(wrong)} are of another form"
    return found, ""


def _is_random(value: Any) -> bool:
    try:
        torch.Generator().set_state(value)
    except (TypeError, RuntimeError):
        return False
    return True


def _is_batches(value: Any) -> bool:
    return is_named(value) and is_count(value.get("step")) and is_named(value.get("balancer"))


_PARTS: dict[str, Callable[[Any], bool]] = {
    "states": is_named,
    "values": is_named,
    "steps": is_count,
    "random": _is_random,
}
