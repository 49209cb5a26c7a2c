"""Distance of two runs, and the distance to which rounding alone drives them: the floor.

Runs are compared at many places: every loss, every gradient of every step, every weight and buffer at the end. Each is
a :class:`ComparedPlace`, and the distance is the 2-norm of the difference. The floor of a place is the largest such
distance, up to this step, between the run on one device and the same run disturbed by rounding
(:mod:`evener.tools.verify.perturbation`). It is at least:

- for a loss, gradient or weight: one unit in the last place of its norm;
- for a gradient also: one unit in the last place of the norm that it would have if its elements were as large as the
  average element of all gradients. So a gradient that is mathematically zero, of which only rounding is left, is judged
  absolutely;
- for a weight whose gradient is such: the distance that it moved. Adam divides a gradient by its own size and makes
  full steps of rounding errors; their direction has no meaning.

An integer has no floor: any difference counts.
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
"""A gradient counts as noise if rounding changes it by more than this part of its norm."""
_LOOKED_AT = 3
"""Number of steps that decide if a gradient is noise: the first with a gradient, before small differences grow."""


class PlaceKind(StrEnum):
    """Kind of quantity that is compared."""

    LOSS = "loss"
    STATISTIC = "statistic"  # a buffer after the first forward pass
    GRADIENT = "gradient"
    WEIGHT = "weight"
    BUFFER = "buffer"


class ComparedPlace(NamedTuple):
    """A quantity at which runs are compared. Weights and buffers at the end have the number of steps as ``step``."""

    step: int
    kind: PlaceKind
    name: str = ""

    def __str__(self) -> str:
        if self.kind is PlaceKind.LOSS:
            return f"the loss of step {self.step}"
        if self.kind is PlaceKind.GRADIENT:
            return f"the gradient of {self.name} in step {self.step}"
        if self.kind is PlaceKind.STATISTIC:
            return f"{self.name} in step {self.step}"
        return f"{self.name} after {self.step} steps"


Numbers = dict[ComparedPlace, float]
"""A number for each place, in the order in which a run reaches the places."""


def differences(reference: Trajectory, other: Trajectory) -> Numbers:
    """Returns the 2-norm of the difference at each place of ``reference``, up to the last step that both runs have."""
    found: Numbers = {}
    steps = min(len(reference.losses), len(other.losses))
    for step in range(steps):
        found[_of_loss(reference, step)] = _apart(reference.losses[step], other.losses[step])
        for name, value in reference.buffers.items() if step == 0 else ():
            found[ComparedPlace(0, PlaceKind.STATISTIC, name)] = distance(
                value, other.buffers.get(name, _NOTHING)
            )
        for name in reference.shapes:
            pair = (run.gradients[step].get(name, _NOTHING) for run in (reference, other))
            found[ComparedPlace(step, PlaceKind.GRADIENT, name)] = distance(*pair)
        for name, value in _updated(reference, step).items():
            found[ComparedPlace(step, PlaceKind.WEIGHT, name)] = distance(
                value, _updated(other, step).get(name, _NOTHING)
            )
    for name, value in reference.weights.items():
        kind = PlaceKind.WEIGHT if name in reference.shapes else PlaceKind.BUFFER
        found[ComparedPlace(steps, kind, name)] = distance(value, other.weights[name])
    return found


def floor(reference: Trajectory, disturbed: Sequence[Numbers], noise: Sequence[str], eps: float) -> Numbers:
    """Returns the floor of each place.

    Args:
        reference: The run on one device.
        disturbed: Distances of the disturbed runs on one device from ``reference``.
        noise: Parameters whose gradient is rounding alone.
        eps: Relative unit in the last place of the dtype in which the runs compute.
    """
    least = _least(reference, eps)
    highest: dict[tuple[PlaceKind, str], float] = {}
    found: Numbers = {}
    for place in disturbed[0]:
        so_far = (highest.get((place.kind, place.name), 0.0), least.get(place, 0.0))
        found[place] = max(*so_far, *(run[place] for run in disturbed))
        highest[place.kind, place.name] = found[place]
    for place in found:
        if place.kind is PlaceKind.WEIGHT and place.name in noise:
            found[place] = max(found[place], reference.moved.get(place.name, math.inf))
    return found


def times(apart: Numbers, floors: Numbers) -> Numbers:
    """Returns the differences as multiples of their floors."""
    return {place: _ratio(value, floors[place]) for place, value in apart.items() if place in floors}


def real_and_noise(reference: Trajectory, disturbed: Sequence[Numbers]) -> tuple[list[str], list[str]]:
    """Returns the parameters with a real gradient, and those whose gradient is rounding noise alone.

    A gradient is noise if every run computes another one. A parameter whose gradient is always zero is in neither list.
    """
    shaken = {name: _disturbances(name, reference, disturbed) for name in reference.shapes}
    least = {name: min(sizes) for name, sizes in shaken.items() if sizes}
    return [n for n in least if least[n] <= NOISE], [n for n in least if least[n] > NOISE]


def worst(numbers: Mapping[ComparedPlace, float]) -> ComparedPlace:
    """Returns the place of the largest number; NaN counts as the largest."""
    return max(numbers, key=lambda place: math.inf if math.isnan(numbers[place]) else numbers[place])


def distance(a: Tensor, b: Tensor) -> float:
    """Returns the 2-norm of the difference, without the elements where both are the same infinity or NaN."""
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, a - b).norm())


def norm(tensor: Tensor) -> float:
    """Returns the 2-norm of the finite elements."""
    return float(tensor.double().nan_to_num(0.0, posinf=0.0, neginf=0.0).norm())


_NOTHING = torch.zeros(())  # stands for an absent gradient; broadcasts


def _of_loss(run: Trajectory, step: int) -> ComparedPlace:
    return ComparedPlace(step, PlaceKind.LOSS, run.places[step] if run.places else "")


def _updated(run: Trajectory, step: int) -> Sketches:
    return run.updated[step] if run.updated else {}


def _apart(a: float, b: float) -> float:
    return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b)


def _ratio(difference: float, floor_: float) -> float:
    if difference == 0:
        return 0.0
    return difference / floor_ if floor_ else math.inf


def _least(reference: Trajectory, eps: float) -> Numbers:
    """Returns the lower bound of each floor."""
    found: Numbers = {}
    for step, loss in enumerate(reference.losses):
        found[_of_loss(reference, step)] = eps * abs(loss) if math.isfinite(loss) else 0.0
        usual = _root_mean_square(reference, step)
        for name, shape in reference.shapes.items():
            own = norm(reference.gradients[step].get(name, _NOTHING))
            found[ComparedPlace(step, PlaceKind.GRADIENT, name)] = eps * max(
                own, usual * math.sqrt(math.prod(shape))
            )
        for name, value in _updated(reference, step).items():
            found[ComparedPlace(step, PlaceKind.WEIGHT, name)] = eps * norm(value)
    for name, value in reference.weights.items():
        kind = PlaceKind.WEIGHT if name in reference.shapes else PlaceKind.BUFFER
        if name in reference.buffers and value.is_floating_point():
            found[ComparedPlace(0, PlaceKind.STATISTIC, name)] = eps * norm(reference.buffers[name])
        if value.is_floating_point():
            found[ComparedPlace(len(reference.losses), kind, name)] = eps * norm(value)
    return found


def _root_mean_square(reference: Trajectory, step: int) -> float:
    """Returns the root mean square of the elements of all gradients of a step."""
    sketches = reference.gradients[step]
    elements = sum(math.prod(reference.shapes[name]) for name in sketches)
    return math.sqrt(sum(norm(sketch) ** 2 for sketch in sketches.values()) / max(1, elements))


def _disturbances(name: str, reference: Trajectory, disturbed: Sequence[Numbers]) -> list[float]:
    """Returns by which part of its norm rounding changes a parameter's gradient, in the first steps that have one."""
    found = []
    for step, sketches in enumerate(reference.gradients):
        size = norm(sketches.get(name, _NOTHING))
        place = ComparedPlace(step, PlaceKind.GRADIENT, name)
        if size and place in disturbed[0]:
            found.append(max(run[place] for run in disturbed) / size)
        if len(found) == _LOOKED_AT:
            break
    return found
