"""The strategy ``sharded``: divides optimizer state, gradients and weights over ranks, in the three stages of ZeRO.

::

    zero        1              2              3
    weights     whole          whole          in parts        3: PyTorch's FSDP2, equal parts
    gradients   whole          in parts       in parts        1, 2: rows with owners, parts as asked
    optimizer   in parts       in parts       in parts

A higher stage takes less memory and more messages (Rajbhandari and others, SC 2020, https://arxiv.org/abs/1910.02054).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import nn

from evener.distributed.mesh import Layout, Mesh
from evener.errors import ConfigurationError
from evener.strategies.base import Strategy
from evener.strategies.interfaces import Stepper, StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.sharded.divided_updates import DividedUpdates
from evener.strategies.sharded.exact_units import ExactFsdp
from evener.strategies.sharded.fsdp import Fsdp, FsdpSum
from evener.strategies.sharded.zero import Zero
from evener.strategies.sharded.zero_reduce import ZeroSum
from evener.strategies.synchronizer import Synchronizer

_NO_STAGES = (
    "with zero=3 all ranks gather a unit together, and those of a pipeline cut their shares into different numbers of "
    "micro-batches, some of which are in forward while others are in backward; say zero=2, as in --strategy sharded "
    "--strategy-option zero=2 or Sharded(zero=2), which divides all but the weights of a stage"
)
"""Error text: the reason why FSDP2 units cannot be combined with pipeline stages."""


@dataclass(frozen=True)
class Sharded(Strategy):
    """Shards the training state over the axis ``shard``, whose ranks also divide the samples.

    Raises:
        ConfigurationError: If ``zero`` is not 1, 2 or 3, or an option does not go with the chosen stage.
    """

    zero: int = 3
    """ZeRO stage. 1 divides the optimizer state; 2 also divides the gradients; 3 also divides the weights."""
    shard_sizes: str | None = None
    """Stages 1 and 2 only: the part of each rank, such as ``2,1``. None gives equal parts."""
    in_common: bool = False
    """Stages 1 and 2 only: see :class:`~evener.strategies.sharded.zero.Zero`."""
    wrap: str | None = None
    """Stage 3 only: see :class:`~evener.strategies.sharded.fsdp.Fsdp`."""
    reshard: bool = True
    """Stage 3 only: see :class:`~evener.strategies.sharded.fsdp.Fsdp`."""
    offload: bool = False
    """Stage 3 only: see :class:`~evener.strategies.sharded.fsdp.Fsdp`."""

    axis: ClassVar[str] = "shard"
    divides_model: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.zero not in (1, 2, 3):
            raise ConfigurationError(f"zero is {self.zero!r}; there are 1, 2 and 3")
        of_three = {"wrap": self.wrap is not None, "reshard": not self.reshard, "offload": self.offload}
        strange = [name for name, is_set in of_three.items() if is_set and self.zero < 3]
        if strange:
            raise ConfigurationError(
                f"{strange[0]} goes with zero=3, not with zero={self.zero}: leave it out"
            )
        if self.zero == 3 and self.shard_sizes is not None:
            raise ConfigurationError(
                f"shard_sizes={self.shard_sizes} goes with zero=1 and zero=2; with zero=3 PyTorch's FSDP2 has equal "
                "parts: say zero=2, or leave it out"
            )
        if self.zero == 3 and self.in_common:
            raise ConfigurationError(
                "in_common goes with zero=1 and zero=2, where every rank has whole weights: say zero=2, or leave it out"
            )
        self._depth  # noqa: B018 (which checks its options)

    @cached_property
    def _depth(self) -> Fsdp | Zero:
        return (
            Fsdp(self.wrap, self.reshard, self.offload)
            if self.zero == 3
            else Zero(self.zero, self.shard_sizes, self.in_common)
        )

    @property
    def combines(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._depth.combines

    @property
    def sums_bits(self) -> bool:  # type: ignore[override]
        return self.zero == 3 or self._depth.sums_bits

    @property
    def apart(self) -> Mapping[str, str]:  # type: ignore[override]
        return {"pipeline": _NO_STAGES} if self.zero == 3 else {}

    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        return self._depth.layout(world_size, settings)

    def prepared(self, model: nn.Module, learner: Learner) -> Strategy:
        found = replace(self)
        vars(found)["_depth"] = self._depth.prepared(model, learner)
        return found

    def parallelize(self, model: nn.Module, mesh: Mesh, settings: StrategySettings) -> nn.Module:
        return self._depth.parallelize(model, mesh, settings)

    def synchronizer(self, learner: Learner) -> Synchronizer:
        if self.zero == 3 and learner.settings.bits is not None:
            return ExactFsdp(self.wrap, self.reshard, self.offload).synchronizer(learner)
        return self._depth.synchronizer(learner)

    def for_own_loop(self) -> Strategy:
        """A loop sees gradients between backward and update. So stage 1 has them whole, and stage 2 is stage 3, whose
        gradients and weights are FSDP2's DTensors."""
        if self.in_common or not self.reshard or (self.zero == 2 and self.shard_sizes is not None):
            name = "in_common" if self.in_common else "reshard" if not self.reshard else "shard_sizes"
            raise ConfigurationError(
                f"{name} goes with evener.Engine and evener.fit: in a loop of your own a model with zero=2 or 3 has "
                "equal parts of its weights at all times, and one with zero=1 whole ones: leave it out"
            )
        return DividedUpdates(self._parts_of_owners) if self.zero == 1 else replace(self, zero=3)

    def _parts_of_owners(self, degree: int) -> list[float]:
        assert isinstance(self._depth, Zero)
        return self._depth.parts(degree)

    def synchronizer_apart(self, learner: Learner) -> Synchronizer:
        """Returns a synchronizer that sums over the ranks of the axis only, and not over other axes of the mesh."""
        return FsdpSum(learner, apart=True) if self.zero == 3 else ZeroSum(learner, self.zero, apart=True)

    def stepper(self, learner: Learner) -> Stepper:
        return self._depth.stepper(learner)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._depth.check_optimizer(optimizer)
