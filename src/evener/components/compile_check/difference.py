"""Decides whether a compiled graph computes the same as the plain graph, apart from rounding.

Each output, each input that was written to and each gradient is compared by three measures of the difference: its
2-norm, its largest element, and its projection on the plain result. The first finds errors everywhere, the second
errors in a few places, the third a wrong scale, also in low precision. All are relative to the plain result. They are
compared with the graph's *floor*: the differences between the plain trial and trials disturbed by rounding.

::

    plain, compiled      differ by no more than some floors?            ── yes ──▶ the same
    plain, disturbed     (measures the floors, when they are first needed)
    all of it again, twice, with slightly different inputs              ── yes, once ──▶ the same
                                                                        ── never ─────▶ wrong

A number at the edge of a ReLU, or a tie between experts, may fall to either side, depending on the order of sums. With
other inputs it does not. So a result is called wrong only if it differs for all inputs that are tried.

If a graph draws random numbers, both trials begin with the same generator state. A backend may still draw different
numbers. So if the forward pass differs, both graphs are run with several seeds: different random numbers cause
differences in random directions, and wrong code causes differences in the same direction with each seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from evener.components.compile_check.trial import Computed, Inputs, disturbed, trial
from evener.core.complex_numbers import as_real
from evener.hardware import accelerators

FACTOR = 8.0
"""Results that differ by up to this many floors are the same: other algorithms for a product or a convolution differ by
up to four."""
COARSE = 4.0, 1e-2
"""A factor and a fraction: above this fraction of the plain result, the limit is ``factor`` floors. In low precision
both graphs round alike in most places, and eight floors may exceed the whole result."""
_DISTURBED = 3
"""The number of disturbed trials that measure a floor."""
_AGAIN = 2
"""The number of repetitions with other inputs before a result is called wrong."""
_DRAWS = range(100, 112)
"""Seeds for running both graphs if they may draw different random numbers."""
_LEANS = len(_DRAWS) / 2
"""If the squared norm of the sum of differences exceeds the sum of their squared norms by this factor, it is not
chance."""
_LEANING = 1 / 16
"""The fraction of a rounding difference that may be parallel to the plain result, as far as a few trials can tell."""
_SPREAD = 1e-2
"""The relative standard deviation by which other inputs differ from the given ones."""


class Distance(NamedTuple):
    """The differences between two results, relative to the first."""

    norm: float = 0.0
    largest: float = 0.0
    scale: float = 0.0
    least: float = 0.0
    """The minimum floor of all three measures: a unit in the last place."""


_WHOLLY = Distance(math.inf, math.inf, math.inf)
"""The distance between results if shape or type differ, if one is missing, or if the second is not finite where the
first is."""


class GraphPlace(NamedTuple):
    """The result that is compared."""

    kind: str
    """``output``, ``gradient``, or ``left``: an input after the call."""
    at: int
    """The index among the outputs, or among the graph's inputs."""


Differences = dict[GraphPlace, Distance]


@dataclass(frozen=True)
class Wrong:
    """A result that differs from that of the plain graph."""

    place: GraphPlace
    apart: float
    """The relative difference, by the measure with the clearest result."""
    floor: float
    """The floor of that measure."""

    @property
    def floors(self) -> float:
        """The difference in floors."""
        return self.apart / self.floor if self.floor else math.inf


@dataclass
class GraphComparison:
    """Compares two graphs, and remembers the floors that it has measured.

    Args:
        plain: The captured graph.
        compiled: The backend's code for it.
        by_chance: True if the two draw different random numbers, so that some results could not be compared.
    """

    plain: fx.GraphModule
    compiled: Callable[..., Any]
    by_chance: bool = False
    _floors: Differences = field(default_factory=dict)

    def wrong(self, given: Sequence[Any]) -> list[Wrong]:
        """Returns the results that differ for these inputs, the worst first. Returns none if the graphs agree for some
        repetition."""
        first: list[Wrong] = []
        for number in range(1 + _AGAIN):
            found = self._differing(Inputs(given, _SPREAD if number else 0.0, number))
            if not found:
                return []
            first = first or found
        return first

    def _differing(self, inputs: Inputs) -> list[Wrong]:
        plain = trial(self.plain, inputs)
        apart = differences(plain, trial(self.compiled, inputs), inputs)
        if not beyond(apart, self._floors):
            return []
        self._floors = floors(plain, [disturbed(self.plain, inputs, n) for n in range(_DISTURBED)], inputs)
        found = beyond(apart, self._floors)
        drew_alike = all(each.place.kind == "gradient" for each in found)  # the forward pass agrees
        if not found or not plain.drew or drew_alike:
            return found
        others = [trial(self.plain, inputs, draw) for draw in range(_DISTURBED)]
        certain = {each.place for each in beyond(apart, floors(plain, others, inputs))}
        draws = ((trial(self.plain, inputs, n), trial(self.compiled, inputs, n)) for n in _DRAWS)
        certain |= leaning(draws, [each.place for each in found], inputs)
        self.by_chance |= not certain
        return [each for each in found if each.place in certain]


def leaning(
    draws: Iterable[tuple[Computed, Computed]], places: Sequence[GraphPlace], inputs: Inputs
) -> set[GraphPlace]:
    """Returns the places at which two graphs differ whatever random numbers they draw: there, the differences of
    several draws point in the same direction.

    If both compute the same with different random numbers, a difference is as likely as its opposite. The squared norm
    of the sum of ``n`` differences is then about the sum of their squared norms. For equal differences it is ``n``
    times that.
    """
    sums: dict[GraphPlace, Tensor] = {}
    squares: dict[GraphPlace, float] = {}
    for plain, other in draws:
        found = {
            GraphPlace(kind, at): pair
            for kind, pairs in _pairs(plain, other, inputs).items()
            for at, pair in pairs.items()
        }
        for place in places:
            own, its = found[place]
            if own is None or its is None or own.shape != its.shape or not _is_floating(own):
                continue
            difference = torch.nan_to_num(_numbers(its) - _numbers(own))
            sums[place] = sums[place] + difference if place in sums else difference
            squares[place] = squares.get(place, 0.0) + _norm(difference) ** 2
    return {place for place, sum in sums.items() if _norm(sum) ** 2 > _LEANS * squares[place]}


def differences(plain: Computed, other: Computed, inputs: Inputs) -> Differences:
    """Returns the distance of every result of ``other`` from that of ``plain``."""
    found: Differences = {}
    for kind, pairs in _pairs(plain, other, inputs).items():
        usual = _usual([own for own, _ in pairs.values()])
        for index, (own, its) in pairs.items():
            found[GraphPlace(kind, index)] = _apart(own, its, usual)
    return found


def floors(plain: Computed, others: Sequence[Computed], inputs: Inputs) -> Differences:
    """Returns the largest differences between a plain trial and disturbed ones."""
    found: Differences = {}
    for other in others:
        for place, apart in differences(plain, other, inputs).items():
            before = found.get(place, Distance())
            found[place] = Distance(*map(max, before, apart))
    sizes = {GraphPlace("output", at): max(1, each.numel()) for at, each in enumerate(plain.outputs)}
    wanting = zip(inputs.wanting, plain.gradients, strict=True)
    sizes |= {GraphPlace("gradient", at): max(1, each.numel()) for at, each in wanting if each is not None}
    return {
        place: each._replace(scale=max(each.scale, each.norm * max(_LEANING, sizes.get(place, 1) ** -0.5)))
        for place, each in found.items()
    }


def beyond(apart: Differences, floors: Differences) -> list[Wrong]:
    """Returns the results that differ by more than rounding can explain, the worst first."""
    found = []
    for place, each in apart.items():
        floor = floors.get(place, Distance())
        measures = zip(each[:3], floor[:3], strict=True)
        worst = max(
            (Wrong(place, value, max(least, each.least)) for value, least in measures), key=_floors_of
        )
        if worst.apart > limit(worst.floor):
            found.append(worst)
    return sorted(found, key=_floors_of, reverse=True)


def limit(floor: float) -> float:
    """Returns the largest difference at which two results with this floor count as the same."""
    factor, part = COARSE
    return max(factor * floor, min(FACTOR * floor, part))


def _floors_of(wrong: Wrong) -> float:
    return 0.0 if not wrong.apart else wrong.floors


Pairs = Mapping[int, tuple[Tensor | None, Tensor | None]]


def _pairs(plain: Computed, other: Computed, inputs: Inputs) -> dict[str, Pairs]:
    outputs = dict(enumerate(zip_longest(plain.outputs, other.outputs)))
    gradients = dict(zip(inputs.wanting, zip(plain.gradients, other.gradients, strict=True), strict=True))
    both = sorted(plain.left.keys() | other.left.keys())
    before = {} if plain.left.keys() == other.left.keys() else dict(enumerate(inputs.copies()[0]))
    own, its = ({**before, **each.left} for each in (plain, other))
    left = {at: (own[at], its[at]) for at in both}
    return {"output": outputs, "gradient": gradients, "left": left}


def _usual(tensors: Sequence[Tensor | None]) -> float:
    """Returns the root mean square of all tensors together. Results that consist only of rounding errors are measured
    by it."""
    numbers = [_numbers(each) for each in tensors if each is not None and _is_floating(each)]
    squares = sum(_norm(torch.where(each.isfinite(), each, 0.0)) ** 2 for each in numbers)
    return math.sqrt(squares / max(1, sum(each.numel() for each in numbers)))


def _apart(own: Tensor | None, its: Tensor | None, usual: float) -> Distance:
    if own is None or its is None:
        there = own if its is None else its
        return _WHOLLY if there is not None and bool((there != 0).any()) else Distance()
    if own.shape != its.shape or own.dtype != its.dtype:
        return _WHOLLY
    if not own.numel() or not _is_floating(own):
        return Distance(float((own != its).double().mean())) if own.numel() else Distance()
    a, b, eps = _numbers(own), _numbers(its), torch.finfo(own.dtype).eps
    finite = a.isfinite()
    if not bool(b.isfinite()[finite].all()):
        return _WHOLLY
    a, b = torch.where(finite, a, 0.0), torch.where(finite, b, 0.0)
    # A result that consists only of rounding errors is measured by the others of its kind.
    usual_norm = usual * math.sqrt(a.numel())
    norm, largest = max(_norm(a), eps * usual_norm), max(float(a.abs().max()), eps * usual)
    if not norm:
        return _WHOLLY if bool(b.any()) else Distance()
    difference = b - a
    scale = float((difference / norm * (a / norm)).sum())
    least = eps * max(1.0, usual_norm / norm)
    return Distance(_norm(difference) / norm, float(difference.abs().max()) / largest, abs(scale), least)


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _numbers(tensor: Tensor) -> Tensor:
    """Returns the values as dense real numbers: in float64 if the device supports it, else in float32."""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    real = as_real(dense)
    return real.to(torch.float64 if accelerators.has_float64(real.device) else torch.float32)


def _norm(numbers: Tensor) -> float:
    return float(torch.linalg.vector_norm(numbers))
