"""Lets ``torch.distributed.checkpoint`` write and read a piece of a tensor.

PyTorch cuts a DTensor into equal pieces, but the pieces here may have any length. An object with two specially named
methods can say itself which part of a whole it holds: the planners ask for these methods before they look at types. The
names have two underscores on each side and are undocumented, so tests/torch_internals checks them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from evener.components.sharded_tensor.shard_spec import ShardBounds, ShardSpec
from evener.components.state_dict import HeldState


class ShardPiece:
    """This rank's part of a sharded tensor."""

    def __init__(self, held: Tensor, piece: ShardSpec) -> None:
        self.held, self._piece = held.detach(), piece
        self._whole = torch.Size(piece.whole_shape(held.shape))
        # Without empty ones, whose offset would be that of another rank's part.
        self._parts = {box.whole: _view(self.held, box) for box in piece.boxes(held.shape) if all(box.shape)}

    @classmethod
    def from_tensor(cls, value: Tensor, piece: ShardSpec | None) -> ShardPiece | Tensor:
        """Returns ``value`` in the form to write: a piece, or the whole tensor."""
        return cls(value, piece) if piece else value.detach()

    @classmethod
    def room(cls, key: str, entry: TensorStorageMetadata, held: HeldState) -> ShardPiece | Tensor:
        """Allocates memory for this rank's part of the saved tensor ``key``."""
        kind, _, name = key.partition("/")
        name = name.rpartition("/")[0] if kind == "optimizer" else name
        piece, parameter = held.slices.get(name), held.model.get(name)
        if kind == "optimizer" and name in held.whole_updates:
            piece = None
        if (
            piece
            and isinstance(parameter, Tensor)
            and tuple(entry.size) == piece.whole_shape(parameter.shape)
        ):
            return cls(torch.empty(parameter.shape, dtype=entry.properties.dtype), piece)
        return torch.empty(entry.size, dtype=entry.properties.dtype)

    def on(self, other: Tensor) -> ShardPiece:
        """Returns the same piece with the values of ``other``."""
        return ShardPiece(other, self._piece)

    def size(self) -> torch.Size:
        """Returns the shape of the whole tensor."""
        return self._whole

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.held)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self._whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Returns the chunks that are not empty: an empty one would be mistaken for another rank's at its offset."""
        return [
            ChunkStorageMetadata(torch.Size(start), part.shape)
            for start, part in self._parts.items()
            if part.numel()
        ]

    def at(self, index: MetadataIndex) -> Tensor:
        """Returns the part at that offset."""
        assert index.offset is not None
        return self._parts[tuple(index.offset)]


def _view(held: Tensor, box: ShardBounds) -> Tensor:
    return held[
        tuple(slice(start, start + length) for start, length in zip(box.held, box.shape, strict=True))
    ]


class PieceSaver(DefaultSavePlanner):
    """Writes a flat state of tensors and pieces.

    The first rank writes what all ranks hold: on hosts without a shared disk, its file is the checkpoint.
    """

    def __init__(self) -> None:
        super().__init__(
            flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
        )

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.at(index) if isinstance(found, ShardPiece) else super().lookup_object(index)


class PieceLoader(DefaultLoadPlanner):
    """Reads into a flat state of tensors and pieces. The base class would drop what is not a tensor."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return found.at(index) if isinstance(found, ShardPiece) else super().lookup_tensor(index)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses the warning that one process saves or loads alone, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninit.*")
        yield
