"""The samples divided over the ranks, and who keeps what of gradients and optimizer: ZeRO stages 1 and 2.

Every rank holds whole weights and computes with them, as with ``ddp``. But of each weight it *owns* some rows only. The
sum of a gradient goes to the owner of the row, the owner alone updates it, and the rows are gathered back::

    stage 2                   rank 0 owns rows a b               rank 1 owns row c
    forward, backward         gradient  a b c                    gradient  a b c
    sums go to owners                   a b  <── sum ──>                       c
    update                    rows      a b                      rows          c
    gathered                            a b c                                  a b c

So the state of the optimizer, and with stage 2 the sum of the gradients, is in memory once and not once a rank. Who
owns how much is one thing and who computes how many samples another: ``owns`` goes by the memory of the ranks, shares
by their speed (Cephalo, ICS 2025, https://arxiv.org/abs/2411.01075). The stages are those of ZeRO (Rajbhandari and
others, SC 2020, https://arxiv.org/abs/1910.02054).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from evener.balance.shares import parse_shares
from evener.components import gradients
from evener.components.sharded_tensor.shard_spec import Slice, by_axes, mark, slice_of
from evener.distributed.mesh import Layout, Mesh
from evener.errors import ConfigurationError, ShareError
from evener.strategies.base import Strategy
from evener.strategies.ddp import summing
from evener.strategies.features import check_elementwise
from evener.strategies.interfaces import Settings, Stepper, Synchronizer
from evener.strategies.learner import Learner
from evener.strategies.sharded.owned_weight import AXIS
from evener.strategies.sharded.ownership import divide_rows
from evener.strategies.sharded.zero_reduce import ZeroSum
from evener.strategies.steppers.plain import Plain
from evener.strategies.sync_batch_norm import normalize_together
from evener.torch_internals.module_tensors import own_parameters


@dataclass(frozen=True)
class Zero(Strategy):
    """Whole weights on every rank; gradients and optimizer in parts.

    Raises:
        ConfigurationError: For a stage that there is not, or parts that are no list of numbers.
    """

    stage: int = 2
    """1 divides the optimizer's state, 2 the sum of the gradients too."""
    owns: str | None = None
    """The part of each rank, such as ``2,1``; equal parts if None."""
    in_common: bool = False
    """Whether the ranks of a host keep whole weights once, also in a loop of the user's own: what one writes to its
    weights outside of ``engine.update()`` the others then see at once, even in the midst of a pass."""

    name: ClassVar[str] = "sharded"
    axis: ClassVar[str] = AXIS
    combines: ClassVar[tuple[str, ...]] = ("pipeline", "data", "context", "tensor")
    divides_model: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.stage not in (1, 2):
            raise ConfigurationError(
                f"there is no stage {self.stage!r} of rows with owners; there are 1 and 2"
            )
        if self.owns is not None:
            self._parts(self.owns.count(",") + 1)

    def layout(self, world_size: int, settings: Settings) -> Layout:
        self._parts(world_size)
        if settings.compression is not None and (self.stage == 2 or settings.compression == "powersgd"):
            raise ConfigurationError(
                f"strategy 'sharded' with zero={self.stage} cannot compress with {settings.compression!r}: leave "
                "compress out, or use strategy 'ddp'"
            )
        return Layout({AXIS: world_size})

    def parallelize(self, model: nn.Module, mesh: Mesh, settings: Settings) -> nn.Module:
        if mesh.degree(AXIS) > 1:
            _cut(model, self._parts(mesh.degree(AXIS)), mesh.index(AXIS))
        return normalize_together(model, mesh)

    def synchronizer(self, learner: Learner) -> Synchronizer:
        return (
            ZeroSum(learner, self.stage, self.in_common)
            if learner.mesh.degree(AXIS) > 1
            else summing(learner)
        )

    def stepper(self, learner: Learner) -> Stepper:
        return Plain(learner)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        check_elementwise(optimizer, self.label)

    def _parts(self, degree: int) -> list[float]:
        if self.owns is None:
            return [1 / degree] * degree
        try:
            return parse_shares(self.owns, degree)
        except ShareError as error:
            raise ConfigurationError(f"owns={self.owns!r} of strategy 'sharded': {error}") from error


def _cut(model: nn.Module, parts: Sequence[float], index: int) -> None:
    """Puts this rank's piece in the place of every weight that is trained."""
    sparse = gradients.sparse_weights(model)
    cut = {parameter: _dim(parameter, parameter in sparse) for parameter in _divisible(model)}
    pieces: dict[nn.Parameter, nn.Parameter] = {}
    # What all ranks of another axis hold alike is cut by itself, and so alike on all of them.
    for alike in by_axes(cut).values():
        tables = [
            (parameter.shape[cut[parameter]], _nbytes_of_row(parameter, cut[parameter]))
            for parameter in alike
        ]
        for parameter, rows in zip(alike, divide_rows(tables, parts), strict=True):
            pieces[parameter] = _piece(parameter, cut[parameter], rows, index)
    for module in model.modules():
        held = own_parameters(module)
        for name, given in held.items():
            if given is not None and given in pieces:
                held[name] = pieces[given]


def _divisible(model: nn.Module) -> Iterator[nn.Parameter]:
    """A number alone has no rows: every rank keeps it, as it does what is not trained. Of what is another stage's of a
    pipeline there are none here, and these are cut too, so that all ranks know over which axes a weight is divided."""
    found = (p for p in model.parameters() if p.requires_grad and p.ndim)
    return (p for p in found if p.numel() or slice_of(p) is not None)


def _dim(parameter: nn.Parameter, sparse: bool) -> int:
    """The first that has more than one row, so that a piece is one stretch of memory."""
    if sparse or not parameter.numel():
        return 0
    return next((dim for dim, size in enumerate(parameter.shape) if size > 1), 0)


def _nbytes_of_row(parameter: nn.Parameter, dim: int) -> int:
    return parameter.nbytes // max(1, parameter.shape[dim])


def _piece(parameter: nn.Parameter, dim: int, rows: tuple[range, ...], index: int) -> nn.Parameter:
    own = nn.Parameter(parameter.detach().narrow(dim, rows[index].start, len(rows[index])).clone())
    vars(own).update(vars(parameter))
    return mark(own, Slice(AXIS, dim, rows, index, within=slice_of(parameter)))
