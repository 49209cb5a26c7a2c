"""What a rank holds of a tensor that is divided over the ranks of a mesh.

A strategy that divides the model marks each divided parameter with its :class:`Slice`. All that follows from it is done
once, for any strategy: gradients are clipped by the norm of the whole, a penalty sees whole weights, and the state of a
run is saved and taken up by ranks that divide it otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.borrowed.module_tensors import own_parameters
from evener.errors import ConfigurationError
from evener.hardware.stopwatch import waiting
from evener.runtime.mesh import Mesh

_MARK = "evener_slice"


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

    def part(self, whole: Tensor) -> Tensor:
        """This rank's piece of ``whole``, as a copy."""
        given = self.within.part(whole) if self.within else whole
        return given.narrow(self.dim, self.own.start, len(self.own)).clone()

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor, from that of a piece."""
        shape = list(part)
        shape[self.dim] = self.pieces[-1].stop
        return self.within.whole_shape(shape) if self.within else tuple(shape)

    def offsets(self, ndim: int) -> tuple[int, ...]:
        """Where this rank's piece begins in the whole tensor."""
        outer = self.within.offsets(ndim) if self.within else (0,) * ndim
        return tuple(start + (self.own.start if dim == self.dim else 0) for dim, start in enumerate(outer))

    def gather(self, part: Tensor, mesh: Mesh) -> Tensor:
        """The pieces of all ranks side by side. A collective call."""
        found = self._side_by_side(part.detach(), mesh)
        return self.within.gather(found, mesh) if self.within else found

    def _side_by_side(self, part: Tensor, mesh: Mesh) -> Tensor:
        group, pieces = mesh.group(self.axis), list[Tensor]()
        if group is None:
            return part
        for index, piece in enumerate(self.pieces):
            shape = [*part.shape[: self.dim], len(piece), *part.shape[self.dim + 1 :]]
            held = part.contiguous() if index == self.index else part.new_empty(shape)
            with waiting():
                dist.broadcast(held, group=group, group_src=index)
            pieces.append(held)
        return torch.cat(pieces, self.dim)


def mark(parameter: nn.Parameter, piece: Slice) -> nn.Parameter:
    """Says that ``parameter`` is a piece of a divided one.

    Raises:
        ConfigurationError: If it is not as long as the piece along its dimension.
    """
    shape = tuple(parameter.shape)
    if not 0 <= piece.dim < len(shape) or shape[piece.dim] != len(piece.own):
        raise ConfigurationError(
            f"a parameter of shape {shape} is not {piece.own}, {len(piece.own)} long, of dimension {piece.dim}"
        )
    setattr(parameter, _MARK, piece)
    return parameter


def slice_of(tensor: Tensor) -> Slice | None:
    """Which piece a parameter is; None if the rank holds it whole."""
    found: Slice | None = getattr(tensor, _MARK, None)
    return found


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
