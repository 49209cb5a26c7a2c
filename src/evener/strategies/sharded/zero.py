"""ZeRO stages 1 and 2: divides the samples, the optimizer state and (stage 2) the summed gradients over the ranks.

Every rank holds whole weights and computes with them, as with ``ddp``. But each rank *owns* only some rows of each
weight. The gradient sum of a row goes to its owner. The owner alone updates the row, and then all ranks gather it::

    stage 2                   rank 0 owns rows a b               rank 1 owns row c
    forward, backward         gradient  a b c                    gradient  a b c
    sums go to owners                   a b  <── sum ──>                       c
    update                    rows      a b                      rows          c
    gathered                            a b c                                  a b c

So the optimizer state, and with stage 2 the summed gradients, are in memory once and not once per rank. The rows that a
rank owns do not depend on the samples that it computes: ``shard_sizes`` follows the memory of the ranks, shares
follow their speed (Cephalo, ICS 2025, https://arxiv.org/abs/2411.01075). The stages are those of ZeRO (Rajbhandari and
others, SC 2020, https://arxiv.org/abs/1910.02054).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from evener.balance.shares import parse_shares
from evener.components import gradients
from evener.components.model_init import in_type
from evener.components.optim.whole_updates import OwnershipTerms
from evener.components.sharded_tensor.shard_spec import (
    ShardSpec,
    by_axes,
    set_shard_spec,
    shard_spec,
    take_attributes,
)
from evener.distributed.mesh import Layout, Mesh
from evener.errors import ConfigurationError, ShareError
from evener.nn.fqn import clean_name
from evener.strategies.base import Strategy
from evener.strategies.ddp import summing
from evener.strategies.exact_sums import check_layouts
from evener.strategies.interfaces import Stepper, StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.sharded.owned_weight import AXIS
from evener.strategies.sharded.ownership import dim_of_rows, one_owner, rows_of_owners
from evener.strategies.sharded.zero_reduce import ZeroSum
from evener.strategies.steppers.plain import Plain
from evener.strategies.sync_batch_norm import normalize_together
from evener.strategies.synchronizer import Synchronizer
from evener.torch_internals.modules import own_parameters


@dataclass(frozen=True)
class Zero(Strategy):
    """Keeps whole weights on every rank, and divides optimizer state and (stage 2) gradients.

    Raises:
        ConfigurationError: If the stage is not 1 or 2, or ``shard_sizes`` is not a list of numbers.
    """

    stage: int = 2
    """1 divides the optimizer state; 2 also divides the summed gradients."""
    shard_sizes: str | None = None
    """Part of each rank, such as ``2,1``. None gives equal parts."""
    in_common: bool = False
    """Whether the ranks of a host share one copy of the whole weights, also in the user's own training loop. Writes to
    weights outside of ``engine.update()`` are then visible to other ranks at once, even during a pass."""

    ownership: ClassVar[OwnershipTerms] = OwnershipTerms()
    """The weights that have one owner. Set on the object that :meth:`prepared` returns."""

    name: ClassVar[str] = "sharded"
    axis: ClassVar[str] = AXIS
    combines: ClassVar[tuple[str, ...]] = ("pipeline", "data", "context", "tensor")
    divides_model: ClassVar[bool] = True
    sums_bits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.stage not in (1, 2):
            raise ConfigurationError(
                f"there is no stage {self.stage!r} of rows with owners; there are 1 and 2"
            )
        if self.shard_sizes is not None:
            self.parts(self.shard_sizes.count(",") + 1)

    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        self.parts(world_size)
        if settings.compression is not None and (self.stage == 2 or settings.compression == "powersgd"):
            raise ConfigurationError(
                f"strategy 'sharded' with zero={self.stage} cannot compress with {settings.compression!r}: leave "
                "compress out, or use strategy 'ddp'"
            )
        return Layout({AXIS: world_size})

    def prepared(self, model: nn.Module, learner: Learner) -> Strategy:
        found = replace(self)
        object.__setattr__(found, "ownership", learner.ownership)
        return found

    def parallelize(self, model: nn.Module, mesh: Mesh, settings: StrategySettings) -> nn.Module:
        if mesh.degree(AXIS) > 1:
            if settings.bits is not None:
                check_layouts(model)
            _cut(model, self.parts(mesh.degree(AXIS)), mesh.index(AXIS), self._owners(model, mesh, settings))
        return normalize_together(model, mesh)

    def synchronizer(self, learner: Learner) -> Synchronizer:
        return (
            ZeroSum(learner, self.stage, self.in_common)
            if learner.mesh.degree(AXIS) > 1
            else summing(learner)
        )

    def stepper(self, learner: Learner) -> Stepper:
        return Plain(learner)

    def _owners(self, model: nn.Module, mesh: Mesh, settings: StrategySettings) -> dict[nn.Parameter, int]:
        """Returns the owner of each weight that is updated as a whole. Ranks that differ on other axes have the same
        owners, also if they hold different slices of a weight: so shapes are whole, and the slowest rank counts."""
        cut = set(_divisible(model))
        named = ((clean_name(name), parameter) for name, parameter in model.named_parameters())
        found = [p for name, p in named if name in self.ownership.names and p in cut and p.numel()]
        if not found:
            return {}
        terms = self.ownership.along(mesh.layout, (AXIS,), mesh.ranks(AXIS))
        if self.shard_sizes is not None:
            terms = replace(terms, speeds=tuple(self.parts(mesh.degree(AXIS))))
        shapes = [spec.whole_shape(p.shape) if (spec := shard_spec(p)) else tuple(p.shape) for p in found]
        later = settings.weight_type  # the model is converted when it is divided
        types = [p.dtype if later is None else in_type(p, later) for p in found]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, types, strict=True)]
        owners = terms.owners(list(zip(shapes, sizes, strict=True)), held=1.0)
        return dict(zip(found, owners, strict=True))

    def parts(self, degree: int) -> list[float]:
        """Returns the part of the rows that each of ``degree`` owners has."""
        if self.shard_sizes is None:
            return [1 / degree] * degree
        try:
            return parse_shares(self.shard_sizes, degree)
        except ShareError as error:
            raise ConfigurationError(
                f"shard_sizes={self.shard_sizes!r} of strategy 'sharded': {error}"
            ) from error


def _cut(model: nn.Module, parts: Sequence[float], index: int, owners: Mapping[nn.Parameter, int]) -> None:
    """Replaces every trained weight of the model by this rank's piece of it: some rows, or all for an owner of the
    whole."""
    sparse = gradients.sparse_weights(model)
    cut = {p: 0 if p in sparse or not p.numel() else dim_of_rows(p) for p in _divisible(model)}
    pieces: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, owner in owners.items():
        rows = one_owner(parameter.shape[cut[parameter]], owner, len(parts))
        pieces[parameter] = _piece(parameter, cut[parameter], rows, index)
    # Weights divided over the same other axes are cut together, so that all ranks of those axes cut them alike.
    for alike in by_axes(parameter for parameter in cut if parameter not in owners).values():
        of_rows = rows_of_owners({parameter: cut[parameter] for parameter in alike}, parts)
        for parameter, rows in of_rows.items():
            pieces[parameter] = _piece(parameter, cut[parameter], rows, index)
    for module in model.modules():
        held = own_parameters(module)
        for name, given in held.items():
            if given is not None and given in pieces:
                held[name] = pieces[given]


def _divisible(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the trained parameters that are cut; scalars and frozen ones stay whole on every rank. An empty parameter
    with a shard spec belongs to another pipeline stage. It is cut too, so that all ranks know the axes that divide the
    weight."""
    found = (p for p in model.parameters() if p.requires_grad and p.ndim)
    return (p for p in found if p.numel() or shard_spec(p) is not None)


def _piece(parameter: nn.Parameter, dim: int, rows: tuple[range, ...], index: int) -> nn.Parameter:
    own = nn.Parameter(parameter.detach().narrow(dim, rows[index].start, len(rows[index])).clone())
    spec = ShardSpec(AXIS, dim, rows, index, within=shard_spec(parameter))
    return set_shard_spec(take_attributes(own, vars(parameter)), spec)
