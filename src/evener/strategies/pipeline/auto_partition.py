"""The best cut of a model: by what its layers take, by the speed and the memory of the ranks, and by what would cross.

Times are noisy and all ranks measure the same layers. So how fast a rank is says the layer in the middle of all, by how
much longer it took there than where it was fastest, and not the sum, which one disturbance moves.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from evener.balance.layer_partition import partition_layers
from evener.errors import ConfigurationError, EvenerError
from evener.hardware.memory_size import memory_nbytes
from evener.strategies.learner import Learner
from evener.strategies.pipeline.costs import Costs, measure
from evener.strategies.pipeline.p2p import one_way
from evener.strategies.pipeline.stages import layers_of

_ALIKE = 1.15
"""Ranks of which one takes less than this many times another's are taken as equally fast."""
_PING_NBYTES = 2**20


@dataclass(frozen=True)
class Ranks:
    """What the cut goes by, of each place on the axis."""

    speeds: tuple[float, ...]
    """Relative to the fastest."""
    limits: tuple[float, ...]
    """The most bytes of weights."""

    def of_stages(self, stages: int) -> tuple[list[float], list[float]]:
        """Speeds and limits of each stage; stage ``s`` is at place ``s`` modulo the number of places."""
        places = len(self.speeds)
        each = stages // places
        return (
            [self.speeds[stage % places] for stage in range(stages)],
            [self.limits[stage % places] / each for stage in range(stages)],
        )


def partition(
    model: nn.Module,
    layers: Sequence[str],
    seconds: Sequence[float],
    crossing: Sequence[float],
    speeds: Sequence[float],
    limits: Sequence[float],
) -> list[range]:
    """The layers of each stage; none for one whose speed is 0.

    Args:
        crossing: For each cut between two layers, the seconds for which what crosses it is on its way.
    """
    working = [stage for stage, speed in enumerate(speeds) if speed]
    if len(layers) < len(working):
        raise ConfigurationError(
            f"{type(model).__name__} calls {len(layers)} modules one after the other ({', '.join(layers)}), which "
            f"cannot be cut into {len(working)} stages: use fewer ranks, or divide it into more modules"
        )
    nbytes = [sum(p.nbytes for p in model.get_submodule(layer).parameters()) for layer in layers]
    found = iter(
        partition_layers(
            seconds,
            [speeds[stage] for stage in working],
            crossing,
            nbytes,
            [limits[stage] for stage in working],
        )
    )
    pieces = [range(0, 0)]
    for stage in range(len(speeds)):
        following = pieces[-1].stop
        pieces.append(next(found) if stage in working else range(following, following))
    return pieces[1:]


def own_limits(learner: Learner, axis: str) -> list[float]:
    """The most bytes of weights at each place on the axis: the gradients want as much again. A collective call."""
    session = learner.session
    have = memory_nbytes(session.device, session.environment.local_world_size) / 2
    return _of_places(session.control.gather_objects(have), learner, axis)


def measured(
    model: nn.Module, graph: fx.Graph, example: dict[str, Any] | None, learner: Learner
) -> list[Costs]:
    """What each rank of the world measures of the layers; by their weights if they cannot be measured.

    All ranks come to the same cut by the same times, also where several have the same place on the axis.
    """
    session = learner.session
    own: Costs | None = None
    try:
        own = measure(model, graph, example or {}, session.device, learner.settings.weight_type)
    except EvenerError:
        raise
    except Exception as error:
        warnings.warn(
            f"the layers' times could not be measured ({type(error).__name__}: {error}); the model is cut by the "
            "numbers of their weights. Name the cut yourself (cut=) if that is not right",
            stacklevel=2,
        )
    rows = session.control.gather_objects(own)
    if all(row is not None for row in rows):
        return rows
    weights = {
        layer: 1.0 + sum(p.numel() for p in model.get_submodule(layer).parameters())
        for layer in layers_of(graph)
    }
    return [Costs(weights, (0,) * (len(weights) - 1))] * session.world_size


def seconds_and_speeds(rows: Sequence[Costs], learner: Learner, axis: str) -> tuple[list[float], list[float]]:
    """Of each layer at full speed, and of each place on the axis, of whose several ranks the slowest counts."""
    slowness = _slowness([list(row.seconds.values()) for row in rows])
    columns = zip(*(row.seconds.values() for row in rows), strict=True)
    seconds = [min(took / slow for took, slow in zip(column, slowness, strict=True)) for column in columns]
    throttle = learner.settings.throttle
    speeds = [
        (1.0 if slow < _ALIKE else 1 / slow) * (throttle.factor(0, rank) if throttle is not None else 1.0)
        for rank, slow in enumerate(slowness)
    ]
    return seconds, _of_places(speeds, learner, axis)


def _slowness(times: Sequence[Sequence[float]]) -> list[float]:
    """How many times as long each rank takes as the fastest, in the layer in the middle of all time spent."""
    fastest = [min(column) for column in zip(*times, strict=True)]
    found = [
        _middle([own / least for own, least in zip(row, fastest, strict=True)], fastest) for row in times
    ]
    return [slow / min(found) for slow in found]


def _middle(values: Sequence[float], weights: Sequence[float]) -> float:
    """The median, each value counted by its weight."""
    left = sum(weights) / 2
    for value, weight in sorted(zip(values, weights, strict=True)):
        left -= weight
        if left <= 0:
            return value
    return max(values)


def _of_places(values: Sequence[float], learner: Learner, axis: str) -> list[float]:
    """The least of the ranks at each place on the axis."""
    layout = learner.mesh.layout
    found: dict[int, float] = {}
    for rank, value in enumerate(values):
        place = layout.place(rank)[axis]
        found[place] = min(found.get(place, math.inf), value)
    return [found[place] for place in sorted(found)]


def seconds_per_byte(learner: Learner, axis: str) -> float:
    """Of a message between neighbours on the axis, of which the slowest counts. A collective call."""
    group = learner.mesh.new_group(axis)
    own = one_way(_PING_NBYTES, group, learner.session.device) if group is not None else 0.0
    return float(max(learner.session.control.gather_objects(own))) / _PING_NBYTES
