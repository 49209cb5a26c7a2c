"""What a rank holds of a tensor that is divided over the ranks of a mesh.

A strategy that divides the model marks each divided parameter with its :class:`Slice`. All that follows from it is done
once, for any strategy: gradients are clipped by the norm of the whole, a penalty sees whole weights, and the state of a
run is saved and taken up by ranks that divide it otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.components.sharded_tensor.local import local, off_host
from evener.distributed.mesh import Mesh
from evener.errors import ConfigurationError
from evener.hardware.timers import waiting
from evener.torch_internals.module_tensors import own_parameters

_MARK = "evener_slice"

T = TypeVar("T", bound=Tensor)


class Box(NamedTuple):
    """Elements that lie side by side both in a whole tensor and in what a rank holds of it."""

    whole: tuple[int, ...]
    """Where it begins in the whole."""
    held: tuple[int, ...]
    """Where it begins in what is held."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """A piece of a tensor along one dimension, as the ranks of an axis hold one each.

    Raises:
        ConfigurationError: For pieces with gaps or in another order, or an index beyond them.
    """

    axis: str
    """Of the mesh."""
    dim: int
    """Of the tensor."""
    pieces: tuple[range, ...]
    """What each rank of the axis holds, in order and without gaps; they may be of unequal length."""
    index: int
    """This rank's place on the axis."""
    within: Slice | None = None
    """Of another axis, if what is cut here is itself a piece of the whole."""
    blocks: int = 1
    """The dimension is so many blocks of one length side by side, and the pieces are those of each block: as the rows
    of a projection to queries, keys and values are, of which a rank holds those of its heads."""

    def __post_init__(self) -> None:
        edges = [0, *(piece.stop for piece in self.pieces)]
        if list(self.pieces) != [range(start, stop) for start, stop in pairwise(edges)]:
            raise ConfigurationError(
                f"a slice over axis {self.axis!r} has the pieces {list(self.pieces)}; they must follow each other "
                "from 0 on, without gaps"
            )
        if not 0 <= self.index < len(self.pieces):
            raise ConfigurationError(
                f"piece {self.index} of axis {self.axis!r}: there are {len(self.pieces)}"
            )
        if self.within is not None and self.axis in self.within.axes:
            raise ConfigurationError(f"a tensor is cut twice over axis {self.axis!r}")

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which the whole is divided, the outer ones last."""
        return (self.axis, *(self.within.axes if self.within else ()))

    @property
    def own(self) -> range:
        """What this rank holds."""
        return self.pieces[self.index]

    @property
    def length(self) -> int:
        """Of what this rank holds, along the dimension."""
        return self.blocks * len(self.own)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's piece of ``whole``, as a copy."""
        given = self.within.part(whole) if self.within else whole
        own = self._in_blocks(given).narrow(self.dim + 1, self.own.start, len(self.own))
        return own.flatten(self.dim, self.dim + 1).clone()

    def _in_blocks(self, tensor: Tensor) -> Tensor:
        """With the blocks on a dimension of their own, before that of the pieces."""
        shape = tensor.shape
        blocks = (self.blocks, shape[self.dim] // self.blocks)
        return tensor.reshape(*shape[: self.dim], *blocks, *shape[self.dim + 1 :])

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor, from that of a piece."""
        shape = self._given_shape(part)
        return self.within.whole_shape(shape) if self.within else tuple(shape)

    def _given_shape(self, part: Sequence[int]) -> list[int]:
        """Of what is cut here."""
        return [*part[: self.dim], self.blocks * self.pieces[-1].stop, *part[self.dim + 1 :]]

    def boxes(self, part: Sequence[int]) -> list[Box]:
        """How a piece of the shape ``part`` lies in the whole tensor: in one box, or one for each block."""
        block, own = self.pieces[-1].stop, len(self.own)
        shape = (*part[: self.dim], own, *part[self.dim + 1 :])
        found = [
            Box(self._at(number * block + self.own.start, part), self._at(number * own, part), shape)
            for number in range(self.blocks)
        ]
        if self.within is None:
            return found
        outer = self.within.boxes(self._given_shape(part))
        return [both for box in found for other in outer if (both := _overlap(box, other))]

    def _at(self, place: int, part: Sequence[int]) -> tuple[int, ...]:
        return tuple(place if dim == self.dim else 0 for dim in range(len(part)))

    def gather(self, part: Tensor, mesh: Mesh) -> Tensor:
        """The pieces of all ranks side by side. A collective call."""
        found = self._side_by_side(off_host(local(part.detach()), mesh), mesh)
        return self.within.gather(found, mesh) if self.within else found

    def _side_by_side(self, part: Tensor, mesh: Mesh) -> Tensor:
        group, pieces = mesh.group(self.axis), list[Tensor]()
        if group is None:
            return part
        own = self._in_blocks(part)
        for index, piece in enumerate(self.pieces):
            shape = [*own.shape[: self.dim + 1], len(piece), *own.shape[self.dim + 2 :]]
            held = own.contiguous() if index == self.index else part.new_empty(shape)
            with waiting():
                dist.broadcast(held, group=group, group_src=index)
            pieces.append(held)
        return torch.cat(pieces, self.dim + 1).flatten(self.dim, self.dim + 1)


def _overlap(piece: Box, outer: Box) -> Box | None:
    """Of a piece that lies in what ``outer`` holds: the part that is in that box, where it is in the whole."""
    starts = [max(a, b) for a, b in zip(piece.whole, outer.held, strict=True)]
    stops = [
        min(a + n, b + m)
        for a, n, b, m in zip(piece.whole, piece.shape, outer.held, outer.shape, strict=True)
    ]
    shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    if min(shape, default=1) <= 0:
        return None
    in_piece = tuple(h + s - w for h, s, w in zip(piece.held, starts, piece.whole, strict=True))
    in_whole = tuple(w + s - h for w, s, h in zip(outer.whole, starts, outer.held, strict=True))
    return Box(in_whole, in_piece, shape)


def mark(parameter: T, piece: Slice) -> T:
    """Says that ``parameter``, or a buffer, is a piece of a divided one.

    Raises:
        ConfigurationError: If it is not as long as the piece along its dimension.
    """
    shape = tuple(local(parameter).shape)
    if not 0 <= piece.dim < len(shape) or shape[piece.dim] != piece.length:
        raise ConfigurationError(
            f"a parameter of shape {shape} is not {piece.own}, {piece.length} long, of dimension {piece.dim}"
        )
    setattr(parameter, _MARK, piece)
    return parameter


def slice_of(tensor: Tensor) -> Slice | None:
    """Which piece a parameter is; None if the rank holds it whole."""
    found: Slice | None = getattr(tensor, _MARK, None)
    return found


def slice_over(tensor: Tensor, axis: str) -> Slice | None:
    """Which piece over ``axis`` a parameter is, or is a piece of; None if it is not divided over that."""
    piece = slice_of(tensor)
    while piece is not None and piece.axis != axis:
        piece = piece.within
    return piece


def by_axes(parameters: Iterable[nn.Parameter]) -> dict[tuple[str, ...], list[nn.Parameter]]:
    """The parameters by the axes that they are divided over; those that are whole under no axis, always there."""
    found: dict[tuple[str, ...], list[nn.Parameter]] = {(): []}
    for parameter in parameters:
        piece = slice_of(parameter)
        found.setdefault(tuple(sorted(piece.axes)) if piece else (), []).append(parameter)
    return found


def divided(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter, Slice]]:
    """Every divided parameter of the model: the module that holds it, its name there, itself and its slice."""
    for module in model.modules():
        for name, parameter in own_parameters(module).items():
            piece = slice_of(parameter) if parameter is not None else None
            if parameter is not None and piece is not None:
                yield module, name, parameter, piece
