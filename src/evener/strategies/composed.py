"""Combines several strategies over one mesh, each along its own axis.

::

    --mesh data=2,tensor=2      ddp along data, tensor along tensor

                 tensor 0   tensor 1
    data 0       rank 0     rank 1         the model divided between 0 and 1, as between 2 and 3
    data 1       rank 2     rank 3         its gradients summed between 0 and 2, as between 1 and 3

Each strategy divides the model in turn, beginning with the axis that communicates most. The strategy of the ``shard``
axis, or without one that of ``data``, sums gradients over the axes that divide the batch. The other strategies add the
communication that their own axes need.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from evener.core.config.recompute import Recompute
from evener.distributed.mesh import AXES, Layout, Mesh
from evener.errors import ConfigurationError
from evener.strategies.after_backward import summing_afterwards
from evener.strategies.base import Strategy
from evener.strategies.ddp import Ddp
from evener.strategies.interfaces import BatchSlicer, Stepper, StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.registry import strategy_called
from evener.strategies.single import Single
from evener.strategies.synchronizer import Synchronizer

USUAL = {"pipeline": "pipeline", "shard": "sharded", "context": "context", "tensor": "tensor", "data": "ddp"}
"""The default strategy of each axis."""
_DIVIDING = ("tensor", "context", "pipeline", "shard", "data")
"""The order of axes in which their strategies divide the model."""
_STEPPING = ("pipeline", "context", "shard", "tensor", "data")
"""The order of axes in which a stepper is looked for: the first axis in the mesh provides it."""


def laid(parts: Sequence[Strategy], mesh: str | None, world_size: int) -> Strategy:
    """Returns one strategy that combines ``parts`` over the axes of ``mesh``.

    Args:
        parts: The named strategies. Other axes of the mesh get their default strategies. Without parts and without a
            mesh the result is ``ddp``.
        mesh: In the format of ``--mesh``. Remaining ranks go to the axis of the first part that is not in it, or to
            ``data``. With None, a single strategy chooses its own layout.
        world_size: The number of ranks.

    Raises:
        ConfigurationError: If the strategies cannot be combined over such a mesh, with the reason.
    """
    alone = any(part.one_process or part.serves_one_rank for part in parts)
    if world_size == 1 and all(map(_is_of_evener, parts)) and not alone:
        _check_product(degrees_of(mesh), 1)
        return Single()
    if mesh is None and len(parts) < 2:
        return parts[0] if parts else Ddp()
    if mesh is None:
        axes = " and ".join(part.axis for part in parts)
        raise ConfigurationError(
            f"{' and '.join(part.label for part in parts)} together need a mesh that says how many ranks there are "
            f"along {axes}: give mesh"
        )
    degrees = _completed(degrees_of(mesh), parts, world_size)
    found = _one_for_each(degrees, parts)
    if len(found) == 1 and found[0].layout(world_size, StrategySettings()).degrees == degrees:
        return found[0]
    return Composed(found, degrees)


def degrees_of(mesh: str | None) -> dict[str, int]:
    """Parses a mesh such as ``data=2,tensor=2`` into the number of ranks along each axis.

    Raises:
        ConfigurationError: If the format is wrong, or an axis is unknown.
    """
    degrees: dict[str, int] = {}
    for item in mesh.split(",") if mesh else ():
        axis, _, degree = item.partition("=")
        if not degree.isdecimal() or axis in degrees:
            raise ConfigurationError(
                f"mesh {mesh!r}: {item!r} is not of the form AXIS=N, each axis once, as in data=2,tensor=2"
            )
        degrees[axis] = int(degree)
    Layout(degrees)
    return degrees


def _completed(degrees: Mapping[str, int], parts: Sequence[Strategy], world_size: int) -> dict[str, int]:
    """Returns the degrees with the remaining ranks on an axis that is not named, without axes of one rank."""
    free = next((part.axis for part in parts if part.axis not in degrees), "data")
    product = math.prod(degrees.values())
    given = dict(degrees)
    if free not in degrees and world_size % product == 0:
        given[free] = world_size // product
    _check_product(given, world_size)
    return {axis: given[axis] for axis in AXES if given.get(axis, 1) > 1}


def _check_product(degrees: Mapping[str, int], world_size: int) -> None:
    if degrees and math.prod(degrees.values()) != world_size:
        words = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
        raise ConfigurationError(
            f"a mesh of {words} has {math.prod(degrees.values())} places, and there are {world_size} ranks: let the "
            "degrees multiply to that, or leave out one axis, which then has the rest"
        )


def _one_for_each(degrees: Mapping[str, int], parts: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Returns a strategy for each axis, in the order in which they divide the model."""
    of_axis: dict[str, Strategy] = {}
    for part in parts:
        if part.axis in of_axis:
            raise ConfigurationError(
                f"{of_axis[part.axis].label} and {part.label} both want the axis {part.axis!r}: name one of them"
            )
        of_axis[part.axis] = part
    idle = [part for axis, part in of_axis.items() if axis not in degrees]
    if idle:
        raise ConfigurationError(
            f"strategy {idle[0].label!r} divides over the axis {idle[0].axis!r}, of which the mesh has one rank: give "
            f"mesh {idle[0].axis}=2 or more, or leave the strategy out"
        )
    found = [of_axis.get(axis) or strategy_called(USUAL[axis]) for axis in _DIVIDING if axis in degrees]
    for part in found:
        _check_combination(part, degrees)
    return tuple(found)


def _check_combination(part: Strategy, degrees: Mapping[str, int]) -> None:
    strange = [axis for axis in degrees if axis != part.axis and axis not in part.combines]
    if strange:
        others = ", ".join(repr(axis) for axis in part.combines) or "no other"
        reason = f": {part.apart[strange[0]]}" if strange[0] in part.apart else ""
        raise ConfigurationError(
            f"strategy {part.label!r} cannot be laid over a mesh that has the axis {strange[0]!r} too{reason}. "
            f"Its own, {part.axis!r}, goes together with {others}"
        )


def _is_of_evener(part: Strategy) -> bool:
    return type(part).__module__.startswith("evener.")


def parts_of(strategy: Strategy) -> tuple[Strategy, ...]:
    """Returns the strategies of which one is composed, one for each axis of the mesh."""
    return strategy.parts if isinstance(strategy, Composed) else (strategy,)


class Composed(Strategy):
    """Several strategies that run a training step together.

    Args:
        parts: One strategy for each axis, in the order in which they divide the model.
        degrees: The number of ranks along each axis.
    """

    def __init__(self, parts: Sequence[Strategy], degrees: Mapping[str, int]) -> None:
        self._parts, self._degrees = tuple(parts), dict(degrees)

    @property
    def parts(self) -> tuple[Strategy, ...]:
        """The strategies, one for each axis."""
        return self._parts

    @property
    def divides_model(self) -> bool:  # type: ignore[override]
        return any(part.divides_model for part in self._parts)

    @property
    def sums_bits(self) -> bool:  # type: ignore[override]
        return all(part.sums_bits for part in self._parts)

    @property
    def label(self) -> str:
        return " x ".join(f"{part.label} {self._degrees[part.axis]}" for part in reversed(self._parts))

    def __str__(self) -> str:
        return " x ".join(f"{part} {self._degrees[part.axis]}" for part in reversed(self._parts))

    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        _check_product(self._degrees, world_size)
        for part in self._parts:
            part.layout(self._degrees[part.axis], settings)
        return Layout(self._degrees)

    def prepared(self, model: nn.Module, learner: Learner) -> Strategy:
        return Composed([part.prepared(model, learner) for part in self._parts], self._degrees)

    def parallelize(self, model: nn.Module, mesh: Mesh, settings: StrategySettings) -> nn.Module:
        for part in self._parts:
            model = part.parallelize(model, mesh, settings)
        return model

    def for_own_loop(self) -> Strategy:
        return Composed(tuple(part.for_own_loop() for part in self._parts), self._degrees)

    def synchronizer(self, learner: Learner) -> Synchronizer:
        found = self._summing(learner)
        for part in self._parts:
            found = part.around(learner, found)
        return found

    def _summing(self, learner: Learner) -> Synchronizer:
        """Returns the synchronizer that sums gradients over the axes that divide the batch."""
        dividing = self._of("shard") or self._of("data") or Ddp()
        if type(dividing) is Ddp and not all(part.sums_in_backward for part in self._parts):
            return summing_afterwards(learner)
        return dividing.synchronizer(learner)

    def stepper(self, learner: Learner) -> Stepper:
        leading = next(part for axis in _STEPPING if (part := self._of(axis)) is not None)
        return leading.stepper(learner)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for part in self._parts:
            part.check_optimizer(optimizer)

    def check_recompute(self, asked: Recompute) -> None:
        for part in self._parts:
            part.check_recompute(asked)

    def portion(self, dataset: Any, learner: Learner) -> Any:
        for part in self._parts:
            dataset = part.portion(dataset, learner)
        return dataset

    def pieces(self, learner: Learner) -> BatchSlicer:
        cutting = self._of("context")
        return BatchSlicer() if cutting is None else cutting.pieces(learner)

    def try_model(self, learner: Learner) -> None:
        for part in self._parts:
            part.try_model(learner)

    def _of(self, axis: str) -> Strategy | None:
        return next((part for part in self._parts if part.axis == axis), None)
