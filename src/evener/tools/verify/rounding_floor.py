"""How far two runs lie apart, and how far rounding alone drives them: the floor.

Every loss, every gradient of every step, and every weight and buffer at the end is a :class:`Place` at which runs are
compared: by the 2-norm of the difference. The floor of a place is the largest such difference between the run on one
device and the same run disturbed by rounding (:mod:`evener.tools.verify.perturbation`), so far in that run, but at
least

- of a loss, gradient or weight: one unit in the last place of its norm;
- of a gradient besides: the same of what its norm would be if its elements were as large as those of all parameters
  are on the average. So a gradient that is mathematically zero, and of which only rounding is left, is judged
  absolutely;
- of a weight whose gradient is such: as far as it moved. Adam divides a gradient by its own size, and makes full steps
  of rounding errors; where they lead is of no account.

A whole number has no floor: it is the same, or it is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from evener.tools.verify.trajectory import Sketches, Trajectory

NOISE = 0.5
"""A gradient that rounding changes by this part of its norm has no meaning."""
_LOOKED_AT = 3
"""Steps by which a gradient is called noise: the first in which it is not zero, before small differences grow."""


class Kind(StrEnum):
    """What is compared."""

    LOSS = "loss"
    STATISTIC = "statistic"  # a buffer, as the first forward pass left it
    GRADIENT = "gradient"
    WEIGHT = "weight"
    BUFFER = "buffer"


class Place(NamedTuple):
    """Where runs are compared. Those of weights and buffers are of the end, after ``step`` steps."""

    step: int
    kind: Kind
    name: str = ""

    def __str__(self) -> str:
        if self.kind is Kind.LOSS:
            return f"the loss of step {self.step}"
        if self.kind is Kind.GRADIENT:
            return f"the gradient of {self.name} in step {self.step}"
        if self.kind is Kind.STATISTIC:
            return f"{self.name} in step {self.step}"
        return f"{self.name} after {self.step} steps"


Numbers = dict[Place, float]
"""In the order in which a run meets the places."""


def differences(reference: Trajectory, other: Trajectory) -> Numbers:
    """The 2-norm of the difference at every place that both runs have."""
    found: Numbers = {}
    steps = min(len(reference.losses), len(other.losses))
    for step in range(steps):
        found[_of_loss(reference, step)] = _apart(reference.losses[step], other.losses[step])
        for name, value in reference.buffers.items() if step == 0 else ():
            found[Place(0, Kind.STATISTIC, name)] = distance(value, other.buffers.get(name, _NOTHING))
        for name in reference.shapes:
            pair = (run.gradients[step].get(name, _NOTHING) for run in (reference, other))
            found[Place(step, Kind.GRADIENT, name)] = distance(*pair)
        for name, value in _updated(reference, step).items():
            found[Place(step, Kind.WEIGHT, name)] = distance(value, _updated(other, step).get(name, _NOTHING))
    for name, value in reference.weights.items():
        kind = Kind.WEIGHT if name in reference.shapes else Kind.BUFFER
        found[Place(steps, kind, name)] = distance(value, other.weights[name])
    return found


def floor(reference: Trajectory, disturbed: Sequence[Numbers], noise: Sequence[str], eps: float) -> Numbers:
    """The floor of each place.

    Args:
        reference: The run on one device.
        disturbed: How far disturbed runs on one device lie apart from it.
        noise: The parameters whose gradient is nothing but rounding.
        eps: The unit in the last place, relative, of the type in which the runs compute.
    """
    least = _least(reference, eps)
    highest: dict[tuple[Kind, str], float] = {}
    found: Numbers = {}
    for place in disturbed[0]:
        so_far = (highest.get((place.kind, place.name), 0.0), least.get(place, 0.0))
        found[place] = max(*so_far, *(run[place] for run in disturbed))
        highest[place.kind, place.name] = found[place]
    for place in found:
        if place.kind is Kind.WEIGHT and place.name in noise:
            found[place] = max(found[place], reference.moved.get(place.name, math.inf))
    return found


def times(apart: Numbers, floors: Numbers) -> Numbers:
    """Differences as multiples of their floors."""
    return {place: _ratio(value, floors[place]) for place, value in apart.items() if place in floors}


def real_and_noise(reference: Trajectory, disturbed: Sequence[Numbers]) -> tuple[list[str], list[str]]:
    """Parameters with a gradient, and those of whose gradient nothing is left but rounding: never the same twice.

    One whose gradient is always zero is neither.
    """
    shaken = {name: _disturbances(name, reference, disturbed) for name in reference.shapes}
    least = {name: min(sizes) for name, sizes in shaken.items() if sizes}
    return [n for n in least if least[n] <= NOISE], [n for n in least if least[n] > NOISE]


def worst(numbers: Mapping[Place, float]) -> Place:
    """The place of the largest, of which none is larger than NaN."""
    return max(numbers, key=lambda place: math.inf if math.isnan(numbers[place]) else numbers[place])


def distance(a: Tensor, b: Tensor) -> float:
    """The 2-norm of the difference, without the places where both are the same infinity or NaN."""
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, a - b).norm())


def norm(tensor: Tensor) -> float:
    """The 2-norm of what is finite."""
    return float(tensor.double().nan_to_num(0.0, posinf=0.0, neginf=0.0).norm())


_NOTHING = torch.zeros(())  # in the place of an absent gradient: it broadcasts


def _of_loss(run: Trajectory, step: int) -> Place:
    return Place(step, Kind.LOSS, run.places[step] if run.places else "")


def _updated(run: Trajectory, step: int) -> Sketches:
    return run.updated[step] if run.updated else {}


def _apart(a: float, b: float) -> float:
    return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b)


def _ratio(difference: float, floor_: float) -> float:
    if difference == 0:
        return 0.0
    return difference / floor_ if floor_ else math.inf


def _least(reference: Trajectory, eps: float) -> Numbers:
    """What the floor is at least."""
    found: Numbers = {}
    for step, loss in enumerate(reference.losses):
        found[_of_loss(reference, step)] = eps * abs(loss) if math.isfinite(loss) else 0.0
        usual = _root_mean_square(reference, step)
        for name, shape in reference.shapes.items():
            own = norm(reference.gradients[step].get(name, _NOTHING))
            found[Place(step, Kind.GRADIENT, name)] = eps * max(own, usual * math.sqrt(math.prod(shape)))
        for name, value in _updated(reference, step).items():
            found[Place(step, Kind.WEIGHT, name)] = eps * norm(value)
    for name, value in reference.weights.items():
        kind = Kind.WEIGHT if name in reference.shapes else Kind.BUFFER
        if name in reference.buffers and value.is_floating_point():
            found[Place(0, Kind.STATISTIC, name)] = eps * norm(reference.buffers[name])
        if value.is_floating_point():
            found[Place(len(reference.losses), kind, name)] = eps * norm(value)
    return found


def _root_mean_square(reference: Trajectory, step: int) -> float:
    """Of the elements of all gradients of a step."""
    sketches = reference.gradients[step]
    elements = sum(math.prod(reference.shapes[name]) for name in sketches)
    return math.sqrt(sum(norm(sketch) ** 2 for sketch in sketches.values()) / max(1, elements))


def _disturbances(name: str, reference: Trajectory, disturbed: Sequence[Numbers]) -> list[float]:
    """By which part of its norm rounding changes a parameter's gradient, in the first steps in which it has one."""
    found = []
    for step, sketches in enumerate(reference.gradients):
        size = norm(sketches.get(name, _NOTHING))
        place = Place(step, Kind.GRADIENT, name)
        if size and place in disturbed[0]:
            found.append(max(run[place] for run in disturbed) / size)
        if len(found) == _LOOKED_AT:
            break
    return found
