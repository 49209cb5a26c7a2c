"""What a run can go on from: a directory, whole or absent, that says nothing of how many ranks wrote it.

Tensors go through ``torch.distributed.checkpoint``: every rank writes the pieces that it alone holds, the first rank
what all hold, and a rank that goes on reads what it needs; nobody ever holds the whole of a divided model. All else
lies in one small file::

    checkpoints/
        step-00000120/
            .metadata  __0_0.distcp ...     tensors by name: model/NAME, optimizer/NAME/KEY
            rest.pt                         format, progress, optimizer's groups and other values, balancer, scheduler
        latest                              "step-00000120"; written last, so that a torn write is never the latest

Also the digest by which two sets of weights are compared without keeping them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from evener.errors import ConfigurationError, DataError
from evener.strategies.local import local
from evener.strategies.model import named_tensors
from evener.strategies.pieces import Piece, PieceLoader, PieceSaver
from evener.strategies.state import Held

FORMAT = 1
"""Of what is written here; another is refused."""
LATEST = "latest"
_REST = "rest.pt"
_PREFIX = "step-"


def weights_digest(weights: nn.Module | Mapping[str, Tensor]) -> str:
    """sha256 over the parameters and buffers in order of name: each name, type, shape, then the bytes.

    Every name under which a tied parameter is known counts; buffers that are not saved with the model count too. Of
    a sparse tensor the places and values count.
    """
    named = named_tensors(weights) if isinstance(weights, nn.Module) else weights
    digest = hashlib.sha256()
    for name in sorted(named):
        tensor = local(named[name]).detach().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for dense in _dense(tensor):
            digest.update(_bytes(dense.contiguous()))
    return digest.hexdigest()


def _dense(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout is torch.strided:
        return (tensor,)
    sparse = tensor.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
    return sparse.indices(), sparse.values()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@dataclass(frozen=True)
class Writers:
    """The ranks that write a checkpoint together."""

    group: dist.ProcessGroup | None = None
    """None for one rank alone."""
    rank: int = 0

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)


def save(held: Held, rest: Mapping[str, Any], steps: int, directory: Path, writers: Writers) -> Path:
    """Writes the state after ``steps`` steps; a run that is killed meanwhile leaves the one before. A collective call.

    Returns:
        The directory of the checkpoint.
    """
    target = directory / f"{_PREFIX}{steps:08d}"
    partial = directory / f".{target.name}"
    if writers.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        torch.save({"format": FORMAT, **rest, **_leftovers(held)}, partial / _REST)
    writers.barrier()
    tensors = {key: Piece.of(value, held.slice_of(name, value)) for key, name, value in held.tensors()}
    with _quiet():
        state_dict_saver.save(
            tensors,
            storage_writer=FileSystemWriter(partial),
            planner=PieceSaver(),
            process_group=writers.group,
            no_dist=writers.group is None,
        )
    if writers.rank == 0:
        _publish(partial, target)
    writers.barrier()
    return target


def _leftovers(held: Held) -> dict[str, Any]:
    """What is no dense tensor: of the model, of the optimizer's state, and its groups."""
    kept = {key for key, _, _ in held.tensors()}
    model = {name: value for name, value in held.model.items() if f"model/{name}" not in kept}
    state = {
        name: {key: value for key, value in entries.items() if f"optimizer/{name}/{key}" not in kept}
        for name, entries in held.optimizer["state"].items()
    }
    return {"model": model, "optimizer": held.optimizer | {"state": state}}


def _publish(partial: Path, target: Path) -> None:
    if target.exists():  # of the same step: out of the way in no time, to be removed with the others
        target.rename(partial.with_name(f"{partial.name}.{os.getpid()}"))
    partial.rename(target)
    pointer = target.parent / f".{LATEST}.{os.getpid()}"
    pointer.write_text(target.name + "\n")
    pointer.replace(target.parent / LATEST)
    for other in target.parent.glob(f"*{_PREFIX}*"):
        if other.name not in (target.name, LATEST):
            shutil.rmtree(other, ignore_errors=True)


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
        with _explained(self.path):
            stored = FileSystemReader(self.path).read_metadata().state_dict_metadata
            entries = {
                key: entry for key, entry in stored.items() if isinstance(entry, TensorStorageMetadata)
            }
            room = {key: Piece.room(key, entry, held) for key, entry in entries.items()}
            with _quiet():
                reader = FileSystemReader(self.path)
                state_dict_loader.load(room, storage_reader=reader, planner=PieceLoader(), no_dist=True)
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


def _put(state: dict[str, Any], key: str, value: Tensor) -> None:
    kind, _, name = key.partition("/")
    if kind == "model":
        state["model"][name] = value
        return
    name, _, entry = name.rpartition("/")
    state["optimizer"]["state"].setdefault(name, {})[entry] = value


def find(path: Path) -> Found:
    """The checkpoint of a run directory, its latest, or the one that is named (``step-...``, ``latest``) itself.

    Raises:
        ConfigurationError: If there is none.
        DataError: If it cannot be read, or was written in another format.
    """
    place = _locate(path)
    try:
        rest = torch.load(place / _REST, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(f"{place} cannot be read as a checkpoint: {error}") from error
    if not isinstance(rest, dict) or not {"format", "progress", "optimizer"} <= rest.keys():
        raise DataError(f"{place} is no checkpoint of Evener: its {_REST} does not hold format and progress")
    if rest["format"] != FORMAT:
        raise DataError(
            f"{place} is a checkpoint in format {rest['format']}, this version of Evener reads format {FORMAT}: go on "
            "with the version that wrote it"
        )
    return Found(place, rest)


def _locate(path: Path) -> Path:
    if (path / _REST).is_file():
        return path
    for pointer in (path, path / LATEST, path / "checkpoints" / LATEST):
        if pointer.name == LATEST and pointer.is_file():
            return pointer.parent / pointer.read_text().strip()
    raise ConfigurationError(f"no checkpoint at {path}: there is no {path / 'checkpoints' / LATEST}")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise DataError(f"{path} cannot be read as a checkpoint: {error}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that one process saves alone, which is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninit.*")
        yield
