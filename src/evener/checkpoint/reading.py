"""What checkpoints there are, whether they are whole, and a rank's part of one."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from evener.checkpoint import folder, sums
from evener.errors import ConfigurationError, DataError
from evener.runtime.channel import Channel, LocalChannel
from evener.strategies.pieces import Piece, PieceLoader, quiet
from evener.strategies.state import Held

_METADATA = ".metadata"
_OWN_CLASSES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_NAMES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "WindowsPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}
"""What the description of the tensors is made of: classes of these modules' own, types of numbers, and these names."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that is there."""

    path: Path
    rest: dict[str, Any]

    def read(self, held: Held) -> dict[str, Any]:
        """Model and optimizer as this rank holds them, in memory of their own.

        Args:
            held: The present state, which says what this rank holds; it is not changed.
        """
        room = {key: Piece.room(key, entry, held) for key, entry in self._of("model/", "optimizer/")}
        self.fill(room)
        state: dict[str, Any] = {
            "model": dict(self.rest["model"]),
            "optimizer": {
                **self.rest["optimizer"],
                "state": {name: dict(entries) for name, entries in self.rest["optimizer"]["state"].items()},
            },
        }
        for key, value in room.items():
            _put(state, key, value.held if isinstance(value, Piece) else value)
        return state

    def random(self, rank: int) -> Tensor | None:
        """The states of the random generators of ``rank``; None if there was no such rank."""
        key = f"random/{rank}"
        entry = self.stored().get(key)
        if entry is None:
            return None
        found = torch.empty(entry.size, dtype=entry.properties.dtype)
        self.fill({key: found})
        return found

    def _of(self, *prefixes: str) -> Iterator[tuple[str, TensorStorageMetadata]]:
        return ((key, entry) for key, entry in self.stored().items() if key.startswith(prefixes))

    def stored(self) -> dict[str, TensorStorageMetadata]:
        """Type and shape of every tensor, by key.

        Raises:
            DataError: If the description of the tensors cannot be read, or would run code.
        """
        with _explained(self.path):
            _check_metadata(self.path / _METADATA)
            found = FileSystemReader(self.path).read_metadata().state_dict_metadata
        return {key: entry for key, entry in found.items() if isinstance(entry, TensorStorageMetadata)}

    def fill(self, room: Mapping[str, Piece | Tensor]) -> None:
        """Reads tensors, or pieces of them, into memory that is there, by key.

        Raises:
            DataError: If they cannot be read.
        """
        with _explained(self.path), quiet():
            state_dict_loader.load(
                dict(room), storage_reader=FileSystemReader(self.path), planner=PieceLoader(), no_dist=True
            )


def _put(state: dict[str, Any], key: str, value: Tensor) -> None:
    kind, _, name = key.partition("/")
    if kind == "model":
        state["model"][name] = value
        return
    name, _, entry = name.rpartition("/")
    state["optimizer"]["state"].setdefault(name, {})[entry] = value


def find(path: Path, tell: Callable[[str], object] = warnings.warn) -> Found:
    """The checkpoint of a run directory, its latest whole one, or the one that is named (``step-...``, ``latest``).

    Args:
        tell: Gets the words about each that is damaged and passed over.

    Raises:
        ConfigurationError: If there is none.
        DataError: If none can be read, or it was written in another format.
    """
    return agreed(path, LocalChannel(), 0, 1, tell)


def agreed(
    path: Path, control: Channel, rank: int, ranks: int, tell: Callable[[str], object] = warnings.warn
) -> Found:
    """As :func:`find`, on all ranks together, each of which looks at some of the files."""
    damaged = ""
    for place in _candidates(path, control, rank):
        if damaged and rank == 0:
            tell(f"{damaged}: going on from {place} instead, which lies before it")
        found, own = None, sums.damage(place, rank, ranks)
        try:
            found = _read(place)
        except DataError as error:
            own = own or str(error)
        wrong = next(filter(None, control.gather_objects(own)), "")
        if not wrong and found is not None:
            return found
        damaged = f"{place} cannot be read as a checkpoint: {wrong.removeprefix(f'{place} ')}"
    raise DataError(damaged)


def _candidates(path: Path, control: Channel, rank: int) -> list[Path]:
    """Rank 0's, for others may see a pointer that is being written in another state."""
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
    return places


def _read(place: Path) -> Found:
    try:
        rest = torch.load(place / folder.REST, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(f"{place} cannot be read as a checkpoint: {error}") from error
    if not isinstance(rest, dict) or not {"format", "progress", "optimizer"} <= rest.keys():
        raise DataError(
            f"{place} is no checkpoint of Evener: its {folder.REST} does not hold format and progress"
        )
    if rest["format"] != folder.FORMAT:
        raise DataError(
            f"{place} is a checkpoint in format {rest['format']}, this version of Evener reads format "
            f"{folder.FORMAT}: go on with the version that wrote it"
        )
    return Found(place, rest)


# The description of the tensors is a pickle, which PyTorch reads without asking what it would run


class _Careful(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in (*_OWN_CLASSES, *_NAMES) and "." not in name:
            found = super().find_class(module, name)
            own = module in _OWN_CLASSES and isinstance(found, type) and found.__module__ == module
            if own or isinstance(found, torch.dtype) or name in _NAMES.get(module, ()):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs: it may run code")


def _check_metadata(path: Path) -> None:
    with path.open("rb") as file:
        _Careful(file).load()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise DataError(f"{path} cannot be read as a checkpoint: {error}") from error
