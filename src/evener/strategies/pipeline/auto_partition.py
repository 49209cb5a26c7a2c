"""Finds the best cut of a model, by times of layers, speed and memory of ranks, and the values that cross.

Times are noisy, but all ranks measure the same layers. So the slowness of a rank is a weighted median over layers of
its time relative to the fastest rank. A single disturbance would distort a sum of times.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from evener.balance.layer_partition import partition_layers
from evener.balance.time_model import weighted_median
from evener.errors import ConfigurationError, EvenerError
from evener.hardware.memory_size import memory_nbytes
from evener.strategies.learner import Learner
from evener.strategies.pipeline.costs import LayerCosts, measure
from evener.strategies.pipeline.p2p import one_way
from evener.strategies.pipeline.stages import layers_of

_ALIKE = 1.15
"""Ranks whose times differ by less than this factor are taken as equally fast."""
_PING_NBYTES = 2**20


@dataclass(frozen=True)
class StageRanks:
    """Speed and memory limit of each place on the axis."""

    speeds: tuple[float, ...]
    """Speeds relative to the fastest."""
    limits: tuple[float, ...]
    """Most bytes of weights."""

    def of_stages(self, stages: int) -> tuple[list[float], list[float]]:
        """Returns speeds and limits of each stage; stage ``s`` is at place ``s`` modulo the number of places."""
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
    """Returns the layers of each stage; none for a stage whose speed is 0.

    Args:
        crossing: For each cut between two layers, the seconds to send the values that cross it.

    Raises:
        ConfigurationError: If there are fewer layers than stages with a speed above 0.
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
    """Returns the most bytes of weights at each place on the axis: half of the memory, as gradients need as much again.
    All ranks must call this together."""
    session = learner.session
    have = memory_nbytes(session.device, session.environment.local_world_size) / 2
    return _of_places(session.control.gather_objects(have), learner, axis)


def measured(
    model: nn.Module, graph: fx.Graph, example: dict[str, Any] | None, learner: Learner
) -> list[LayerCosts]:
    """Returns the layer costs that each rank of the world measures. If a rank cannot measure, all use weight sizes
    instead.

    All ranks must call this together. They get the same rows, so that all find the same cut.
    """
    session = learner.session
    own: LayerCosts | None = None
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
    return [LayerCosts(weights, (0,) * (len(weights) - 1))] * session.world_size


def seconds_and_speeds(
    rows: Sequence[LayerCosts], learner: Learner, axis: str
) -> tuple[list[float], list[float]]:
    """Returns the seconds of each layer at full speed, and the speed of the slowest rank at each place on the axis."""
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
    """Returns for each rank its time relative to the fastest rank, as a median over layers weighted by their times."""
    fastest = [min(column) for column in zip(*times, strict=True)]
    found = [
        weighted_median((own / least, least) for own, least in zip(row, fastest, strict=True))
        for row in times
    ]
    return [slow / min(found) for slow in found]


def _of_places(values: Sequence[float], learner: Learner, axis: str) -> list[float]:
    """Returns for each place on the axis the smallest value of its ranks."""
    layout = learner.mesh.layout
    found: dict[int, float] = {}
    for rank, value in enumerate(values):
        place = layout.place(rank)[axis]
        found[place] = min(found.get(place, math.inf), value)
    return [found[place] for place in sorted(found)]


def seconds_per_byte(learner: Learner, axis: str) -> float:
    """Returns the seconds per byte of the slowest message between neighbours on the axis. All ranks must call this
    together."""
    group = learner.mesh.new_group(axis)
    own = one_way(_PING_NBYTES, group, learner.session.device) if group is not None else 0.0
    return float(max(learner.session.control.gather_objects(own))) / _PING_NBYTES
