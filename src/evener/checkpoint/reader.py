"""Finds checkpoints, checks that they are whole, and reads a rank's part of one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from evener.checkpoint import checksums as sums
from evener.checkpoint import layout as folder
from evener.checkpoint import structure as form
from evener.checkpoint.archive import check_archive
from evener.checkpoint.dcp_planner import PieceLoader, ShardPiece, quiet
from evener.checkpoint.remote.fetch import fetched
from evener.checkpoint.run_mark import UNMARKED, Identity, identity_in
from evener.checkpoint.tensor_index import INDEX, IndexReader, files_of, index_in
from evener.components.optim.nested_state import with_tensors
from evener.components.state_dict import HeldState
from evener.core.text import said, shortened
from evener.distributed.control_channel import Channel, LocalChannel
from evener.errors import ConfigurationError, DataError
from evener.files import open_regular

_LONGEST_REASON = 300


@dataclass(frozen=True)
class StoredCheckpoint:
    """An existing checkpoint."""

    path: Path
    rest: dict[str, Any]
    index: Metadata
    """Which tensors it holds, and in which files."""
    identity: Identity = UNMARKED
    """The run that it belongs to, or one that resumed from it and has saved nothing yet."""
    newest: bool = False
    """True if it was found as the newest of a directory. A run that resumes from it may then continue the same run."""

    def read(self, held: HeldState) -> dict[str, Any]:
        """Reads this rank's part of model and optimizer into new memory.

        Args:
            held: The current state, which tells what this rank holds; it is not changed.
        """
        room = {
            key: ShardPiece.room(key, entry, held)
            for key, entry in self._of("model/", "optimizer/", "average/")
            if not _is_elsewhere(key, held)
        }
        self.fill(room)
        state: dict[str, Any] = {
            "model": dict(self.rest["model"]),
            "average": {},
            "optimizer": {
                **self.rest["optimizer"],
                "state": {name: dict(entries) for name, entries in self.rest["optimizer"]["state"].items()},
            },
        }
        for key, value in room.items():
            _put(state, key, value.held if isinstance(value, ShardPiece) else value)
        here = {
            name: entries for name, entries in state["optimizer"]["state"].items() if held.has_state_of(name)
        }
        state["optimizer"]["state"] = {name: with_tensors(entries) for name, entries in here.items()}
        for name, value in held.model.items():
            if isinstance(value, Tensor) and not isinstance(state["model"].get(name, value), Tensor):
                raise DataError(f"{self.path} cannot be read as a checkpoint: it has no tensor for {name}")
        return state

    def average(self, held: HeldState) -> dict[str, Tensor]:
        """Reads this rank's part of the averages of weights; empty if there are none."""
        room = {key: ShardPiece.room(key, entry, held) for key, entry in self._of("average/")}
        self.fill(room)
        pieces = {key: value.held if isinstance(value, ShardPiece) else value for key, value in room.items()}
        return {key.removeprefix("average/"): value for key, value in pieces.items()}

    def random(self, rank: int) -> Tensor | None:
        """Returns the states of the random generators of ``rank``, or None if there was no such rank."""
        key = f"random/{rank}"
        entry = self.stored().get(key)
        if entry is None:
            return None
        found = torch.zeros(entry.size, dtype=entry.properties.dtype)
        self.fill({key: found})
        return found

    @property
    def files(self) -> set[str]:
        """The names of all files that are read from it."""
        return {folder.REST, INDEX, *files_of(self.index)}

    def _of(self, *prefixes: str) -> Iterator[tuple[str, TensorStorageMetadata]]:
        return ((key, entry) for key, entry in self.stored().items() if key.startswith(prefixes))

    def stored(self) -> dict[str, TensorStorageMetadata]:
        """Returns type and shape of every tensor, by key."""
        entries = self.index.state_dict_metadata
        return {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def fill(self, room: Mapping[str, ShardPiece | Tensor]) -> None:
        """Reads tensors, or pieces of them, into existing memory, by key.

        Raises:
            DataError: If they cannot be read.
        """
        with _explained(self.path), quiet():
            reader = IndexReader(self.path, self.index)
            state_dict_loader.load(dict(room), storage_reader=reader, planner=PieceLoader(), no_dist=True)


def _is_elsewhere(key: str, held: HeldState) -> bool:
    """Returns True for state of the optimizer that another rank has whole."""
    kind, _, name = key.partition("/")
    return kind == "optimizer" and not held.has_state_of(name.rpartition("/")[0])


def _put(state: dict[str, Any], key: str, value: Tensor) -> None:
    kind, _, name = key.partition("/")
    if kind != "optimizer":
        state[kind][name] = value
        return
    name, _, entry = name.rpartition("/")
    state["optimizer"]["state"].setdefault(name, {})[entry] = value


def find(path: Path, tell: Callable[[str], object] = warnings.warn) -> StoredCheckpoint:
    """Returns a run directory's latest whole checkpoint, or the one that is named (``step-...``, ``latest``).

    Args:
        path: If it lies elsewhere, it is brought here first.
        tell: Called with a message about each damaged checkpoint that is skipped.

    Raises:
        ConfigurationError: If there is none.
        DataError: If none can be read, or it was written in another format.
    """
    return agreed(fetched(path, tell, checkpoint=True), LocalChannel(), 0, 1, tell)


def agreed(
    path: Path, control: Channel, rank: int, ranks: int, tell: Callable[[str], object] = warnings.warn
) -> StoredCheckpoint:
    """Does the same as :func:`find` on all ranks together. Each rank checks some of the files."""
    damaged, places = "", _candidates(path, control, rank, tell)
    by_directory = folder.is_by_directory(path)
    for place in places:
        if damaged and rank == 0:
            tell(f"{damaged}: going on from {place} instead, which lies before it")
        found, own = None, sums.damage(place, rank, ranks)
        try:
            found = _read(place)
            own = (
                own or sums.lacking(place, found.files) or (folder.wrong_mark(place) if by_directory else "")
            )
        except DataError as error:
            own = own or str(error)
        wrong = next(filter(None, control.gather_objects(own)), "")
        if not wrong and found is not None:
            newest = place == places[0] and by_directory
            return replace(found, identity=_identity_of(place, found, newest), newest=newest)
        reason = wrong.removeprefix(f"{place} ").removeprefix("cannot be read as a checkpoint: ")
        damaged = f"{place} cannot be read as a checkpoint: {reason}"
    if by_directory:
        damaged += ". No whole one lies before it: name another, or begin a new run in another directory"
    raise DataError(damaged)


def _identity_of(place: Path, found: StoredCheckpoint, newest: bool) -> Identity:
    steps = int(found.rest["progress"]["steps"])
    identity = identity_in(place, steps) or UNMARKED
    return folder.continued(place, steps, identity) if newest else identity


def _candidates(path: Path, control: Channel, rank: int, tell: Callable[[str], object]) -> list[Path]:
    """Returns the candidates that rank 0 finds. Other ranks might see a pointer that is just being written."""
    found: list[Path] | str = []
    if rank == 0:
        try:
            found = folder.candidates(path)
        except ConfigurationError as error:
            found = str(error)
    agreed_on = control.broadcast_object(found)
    if isinstance(agreed_on, str):
        raise ConfigurationError(agreed_on)
    places: list[Path] = agreed_on
    if rank == 0 and folder.is_by_directory(path) and (lost := folder.lost_latest(places[0].parent)):
        tell(f"{lost}: going on from {places[0]}")
    return places


def _read(place: Path) -> StoredCheckpoint:
    with _explained(place):
        with open_regular(place / folder.REST) as file:
            check_archive(file)
            rest = torch.load(file, map_location="cpu", weights_only=True)
        index = index_in(place)
    if not isinstance(rest, dict) or not isinstance(rest.get("format"), int):
        raise DataError(f"{place} is no checkpoint of Evener: its {folder.REST} does not hold its format")
    if rest["format"] != folder.FORMAT:
        raise DataError(
            f"{place} is a checkpoint in format {rest['format']}, this version of Evener reads format "
            f"{folder.FORMAT}: go on with the version that wrote it"
        )
    wrong = form.lacks(rest)
    if wrong:
        raise DataError(f"{place} is no checkpoint of Evener: its {folder.REST} does not hold {wrong}")
    found = StoredCheckpoint(place, rest, index)
    if strange := _strange_key(found):
        raise DataError(
            f"{place} is no checkpoint of Evener: {strange!r} is of no parameter of its optimizer"
        )
    return found


def _strange_key(found: StoredCheckpoint) -> str:
    """Returns the key of an optimizer tensor whose parameter the optimizer does not have, or ""."""
    names = form.parameters_of(found.rest["optimizer"])
    for key in found.stored():
        kind, _, rest = key.partition("/")
        name, _, entry = rest.rpartition("/")
        if kind == "optimizer" and (name not in names or not entry):
            return key
    return ""


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
        raise DataError(f"{path} cannot be read as a checkpoint: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Returns one line of the error. PyTorch packs errors into one that shows the tracebacks of all."""
    if isinstance(error, CheckpointException):
        error = next((cause for cause, _ in error.failures.values()), error)
    line = next((line for line in said(error).splitlines() if line.strip()), type(error).__name__)
    if "weights_only" in line:  # PyTorch advises to turn weights_only off
        line = "it is torn, or holds more than tensors and plain values, which may run code"
    return shortened(line, _LONGEST_REASON)
