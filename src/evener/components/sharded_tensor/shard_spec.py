"""Describes the shard that a rank holds of a tensor divided over the ranks of a mesh.

A strategy that divides the model marks each divided parameter with its :class:`ShardSpec`. Common code for all
strategies uses these marks: to clip gradients by the norm of the whole, to compute a penalty of whole weights, and to
save state that ranks can load under another division.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.components.sharded_tensor.local import local, off_host
from evener.core.message_types import sendable
from evener.distributed.mesh import Mesh
from evener.errors import ConfigurationError
from evener.hardware.timers import waiting
from evener.torch_internals.modules import own_parameters

_MARK = "evener_slice"
_OWN = "evener_", "_is_param"
"""Beginnings of names of attributes that are not the user's; the last one is a DTensor's."""

T = TypeVar("T", bound=Tensor)


class ShardBounds(NamedTuple):
    """A box of elements that is contiguous both in the whole tensor and in the shard."""

    whole: tuple[int, ...]
    """Its start in the whole tensor."""
    held: tuple[int, ...]
    """Its start in the shard."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ShardSpec:
    """A shard of a tensor along one dimension. Each rank of an axis holds one.

    Raises:
        ConfigurationError: If the pieces have gaps or are not in order, if the index is invalid, or if an axis divides
            the tensor twice.
    """

    axis: str
    """The mesh axis."""
    dim: int
    """The tensor's dimension."""
    pieces: tuple[range, ...]
    """The range of each rank of the axis, in order and without gaps. Ranges may have different lengths."""
    index: int
    """This rank's index on the axis."""
    within: ShardSpec | None = None
    """The shard over another axis, if this is a shard of a shard."""
    blocks: int = 1
    """The number of equal blocks of the dimension; the pieces apply to each block. For example, a rank holds the rows
    of its heads in a joint projection to queries, keys and values, which has 3 blocks."""

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
        """The axes over which the whole tensor is divided; the outer ones come last."""
        return (self.axis, *(self.within.axes if self.within else ()))

    @property
    def local_bounds(self) -> range:
        """The range that this rank holds, in each block."""
        return self.pieces[self.index]

    @property
    def length(self) -> int:
        """The length of the shard along the dimension."""
        return self.blocks * len(self.local_bounds)

    def part(self, whole: Tensor) -> Tensor:
        """Returns this rank's shard of ``whole``, as a copy."""
        given = self.within.part(whole) if self.within else whole
        own = self._in_blocks(given).narrow(self.dim + 1, self.local_bounds.start, len(self.local_bounds))
        return own.flatten(self.dim, self.dim + 1).clone()

    def _in_blocks(self, tensor: Tensor) -> Tensor:
        """Returns the tensor with the blocks as an additional dimension before that of the pieces."""
        shape = tensor.shape
        blocks = (self.blocks, shape[self.dim] // self.blocks)
        return tensor.reshape(*shape[: self.dim], *blocks, *shape[self.dim + 1 :])

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the whole tensor, given the shape of a shard."""
        shape = self._given_shape(part)
        return self.within.whole_shape(shape) if self.within else tuple(shape)

    def _given_shape(self, part: Sequence[int]) -> list[int]:
        """Returns the shape of the tensor that this axis divides."""
        return [*part[: self.dim], self.blocks * self.pieces[-1].stop, *part[self.dim + 1 :]]

    def boxes(self, part: Sequence[int]) -> list[ShardBounds]:
        """Returns where a shard of shape ``part`` is in the whole tensor: one box, or more with several blocks."""
        block, own = self.pieces[-1].stop, len(self.local_bounds)
        shape = (*part[: self.dim], own, *part[self.dim + 1 :])
        found = [
            ShardBounds(
                self._at(number * block + self.local_bounds.start, part), self._at(number * own, part), shape
            )
            for number in range(self.blocks)
        ]
        if self.within is None:
            return found
        outer = self.within.boxes(self._given_shape(part))
        return [both for box in found for other in outer if (both := _overlap(box, other))]

    def _at(self, place: int, part: Sequence[int]) -> tuple[int, ...]:
        return tuple(place if dim == self.dim else 0 for dim in range(len(part)))

    def gather(self, part: Tensor, mesh: Mesh) -> Tensor:
        """Returns the whole tensor, gathered from the shards of all ranks. All ranks must call this together."""
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
                dist.broadcast(sendable(held), group=group, group_src=index)
            pieces.append(held)
        return torch.cat(pieces, self.dim + 1).flatten(self.dim, self.dim + 1)


def _overlap(piece: ShardBounds, outer: ShardBounds) -> ShardBounds | None:
    """Returns the part of box ``piece`` that is in box ``outer``, as a box in the whole tensor. Returns None if there
    is none."""
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
    return ShardBounds(in_whole, in_piece, shape)


def set_shard_spec(parameter: T, piece: ShardSpec) -> T:
    """Marks ``parameter``, or a buffer, as a shard. Returns it.

    Raises:
        ConfigurationError: If its length along the dimension is not that of the shard.
    """
    shape = tuple(local(parameter).shape)
    if not 0 <= piece.dim < len(shape) or shape[piece.dim] != piece.length:
        raise ConfigurationError(
            f"a parameter of shape {shape} is not {piece.local_bounds}, {piece.length} long, of dimension {piece.dim}"
        )
    setattr(parameter, _MARK, piece)
    return parameter


def take_attributes(made: T, attributes: Mapping[str, Any]) -> T:
    """Sets the user's attributes on ``made``, by which an optimizer may make groups. Returns it. Those that it has stay
    as they are, such as the device of a tensor without numbers.

    Args:
        attributes: ``vars()`` of the parameter whose place it takes.
    """
    for name, value in attributes.items():
        if not name.startswith(_OWN):
            vars(made).setdefault(name, value)
    return made


def shard_spec(tensor: Tensor) -> ShardSpec | None:
    """Returns the shard that a parameter is. Returns None if the rank holds it whole."""
    found: ShardSpec | None = getattr(tensor, _MARK, None)
    return found


def slice_over(tensor: Tensor, axis: str) -> ShardSpec | None:
    """Returns the parameter's shard over ``axis``, which may itself be divided further. Returns None if it is not
    divided over ``axis``."""
    piece = shard_spec(tensor)
    while piece is not None and piece.axis != axis:
        piece = piece.within
    return piece


def by_axes(parameters: Iterable[nn.Parameter]) -> dict[tuple[str, ...], list[nn.Parameter]]:
    """Groups the parameters by the axes over which they are divided. The group of whole parameters, under ``()``,
    always exists."""
    found: dict[tuple[str, ...], list[nn.Parameter]] = {(): []}
    for parameter in parameters:
        piece = shard_spec(parameter)
        found.setdefault(tuple(sorted(piece.axes)) if piece else (), []).append(parameter)
    return found


def divided(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter, ShardSpec]]:
    """Yields every divided parameter of the model: the module that holds it, its name there, the parameter and its
    shard."""
    for module in model.modules():
        for name, parameter in own_parameters(module).items():
            piece = shard_spec(parameter) if parameter is not None else None
            if parameter is not None and piece is not None:
                yield module, name, parameter, piece
