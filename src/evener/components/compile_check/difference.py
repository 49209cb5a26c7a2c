"""Whether what a compiled graph computed is what the plain graph computes, as far as rounding lets it.

Each output, each input that was written to and each gradient is compared by three measures: the 2-norm of the
difference, its largest element, and how much of the plain result lies in it. The first finds what is wrong all over,
the second what is wrong in a few places, the third a wrong scale, also in few bits. All are parts of the plain result,
and of them the graph's own *floor* is asked: how far disturbed trials lie apart from the plain one.

::

    plain, compiled      apart by no more than some floors?             ── yes ──▶ the same
    plain, disturbed     (the floors, when they are first needed)
    all of it again, twice, with inputs that are a little different     ── yes, once ──▶ the same
                                                                        ── never ─────▶ something else

A number at the edge of a ReLU, or a choice between experts at a tie, falls to one side in one order of sums and to the
other in another. With other inputs it does not, so that only what is wrong with all of them is called wrong.

Where a graph draws random numbers, both begin with the same state of the generators. A backend may draw others all the
same, or some of them. If the forward pass differs, both are therefore computed with several seeds: other random numbers
make differences that go anywhere, and wrong code makes some that go the same way with each.
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
from evener.hardware import accelerators

FACTOR = 8.0
"""So many floors apart is the same: other algorithms for a product or a convolution lie up to four apart."""
COARSE = 4.0, 1e-2
"""Beyond this part of the plain result it is so many floors: where results have few bits, both round in most places
alike, and eight floors may be more than the whole result."""
_DISTURBED = 3
"""Disturbed trials that measure a floor."""
_AGAIN = 2
"""Repetitions with other inputs before something is called wrong."""
_DRAWS = range(100, 112)
"""Seeds with which both are computed where their random numbers may not be the same."""
_LEANS = len(_DRAWS) / 2
"""Above so many times the sum of the squared norms of differences, the squared norm of their sum is no chance."""
_LEANING = 1 / 16
"""So much of a difference by rounding may go along with the plain result, as far as few trials can tell."""
_SPREAD = 1e-2
"""How far other inputs lie from those that were given."""


class Apart(NamedTuple):
    """How far two results lie apart, as parts of the first."""

    norm: float = 0.0
    largest: float = 0.0
    scale: float = 0.0
    least: float = 0.0
    """The floor that each of these has at least: a unit in the last place."""


_WHOLLY = Apart(math.inf, math.inf, math.inf)
"""Of another shape or type, not there, or not finite where the first is."""


class Place(NamedTuple):
    """What is compared."""

    kind: str
    """``output``, ``gradient`` or ``left``: an input as it is afterwards."""
    at: int
    """Of the outputs, or of the graph's inputs."""


Differences = dict[Place, Apart]


@dataclass(frozen=True)
class Wrong:
    """A result that is not that of the plain graph."""

    place: Place
    apart: float
    """By which part of it, by the measure that finds it most."""
    floor: float
    """How far rounding moves it by that measure."""

    @property
    def floors(self) -> float:
        """How many floors apart."""
        return self.apart / self.floor if self.floor else math.inf


@dataclass
class Comparison:
    """Compares two graphs, and knows from the first time how far rounding goes.

    Args:
        plain: As it was captured.
        compiled: What a backend made of it.
    """

    plain: fx.GraphModule
    compiled: Callable[..., Any]
    by_chance: bool = False
    """Whether the two draw random numbers that are not the same, and so were not compared."""
    _floors: Differences = field(default_factory=dict)

    def wrong(self, given: Sequence[Any]) -> list[Wrong]:
        """What differs for these inputs, the worst first."""
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
        drew_alike = all(
            each.place.kind == "gradient" for each in found
        )  # nothing of the forward pass differs
        if not found or not plain.drew or drew_alike:
            return found
        others = [trial(self.plain, inputs, draw) for draw in range(_DISTURBED)]
        certain = {each.place for each in beyond(apart, floors(plain, others, inputs))}
        draws = ((trial(self.plain, inputs, n), trial(self.compiled, inputs, n)) for n in _DRAWS)
        certain |= leaning(draws, [each.place for each in found], inputs)
        self.by_chance |= not certain
        return [each for each in found if each.place in certain]


def leaning(
    draws: Iterable[tuple[Computed, Computed]], places: Sequence[Place], inputs: Inputs
) -> set[Place]:
    """The places at which two graphs differ however they draw: the differences of several draws go the same way.

    Where both compute the same of other random numbers, each difference is as likely as its opposite. Of so many of
    them the squared norm of the sum is then about the sum of the squared norms, and at most that times their number.
    """
    sums: dict[Place, Tensor] = {}
    squares: dict[Place, float] = {}
    for plain, other in draws:
        found = {
            Place(kind, at): pair
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
    """How far every result of ``other`` lies apart from that of ``plain``."""
    found: Differences = {}
    for kind, pairs in _pairs(plain, other, inputs).items():
        usual = _usual([own for own, _ in pairs.values()])
        for index, (own, its) in pairs.items():
            found[Place(kind, index)] = _apart(own, its, usual)
    return found


def floors(plain: Computed, others: Sequence[Computed], inputs: Inputs) -> Differences:
    """The largest differences between a plain trial and disturbed ones."""
    found: Differences = {}
    for other in others:
        for place, apart in differences(plain, other, inputs).items():
            before = found.get(place, Apart())
            found[place] = Apart(*map(max, before, apart))
    sizes = {Place("output", at): max(1, each.numel()) for at, each in enumerate(plain.outputs)}
    wanting = zip(inputs.wanting, plain.gradients, strict=True)
    sizes |= {Place("gradient", at): max(1, each.numel()) for at, each in wanting if each is not None}
    return {
        place: each._replace(scale=max(each.scale, each.norm * max(_LEANING, sizes.get(place, 1) ** -0.5)))
        for place, each in found.items()
    }


def beyond(apart: Differences, floors: Differences) -> list[Wrong]:
    """What lies further apart than rounding can explain, the worst first."""
    found = []
    for place, each in apart.items():
        floor = floors.get(place, Apart())
        measures = zip(each[:3], floor[:3], strict=True)
        worst = max(
            (Wrong(place, value, max(least, each.least)) for value, least in measures), key=_floors_of
        )
        if worst.apart > limit(worst.floor):
            found.append(worst)
    return sorted(found, key=_floors_of, reverse=True)


def limit(floor: float) -> float:
    """The most that two results of this floor may lie apart."""
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
    """The root of the mean square of all their numbers, by which is measured where rounding alone is left."""
    numbers = [_numbers(each) for each in tensors if each is not None and _is_floating(each)]
    squares = sum(_norm(torch.where(each.isfinite(), each, 0.0)) ** 2 for each in numbers)
    return math.sqrt(squares / max(1, sum(each.numel() for each in numbers)))


def _apart(own: Tensor | None, its: Tensor | None, usual: float) -> Apart:
    if own is None or its is None:
        there = own if its is None else its
        return _WHOLLY if there is not None and bool((there != 0).any()) else Apart()
    if own.shape != its.shape or own.dtype != its.dtype:
        return _WHOLLY
    if not own.numel() or not _is_floating(own):
        return Apart(float((own != its).double().mean())) if own.numel() else Apart()
    a, b, eps = _numbers(own), _numbers(its), torch.finfo(own.dtype).eps
    finite = a.isfinite()
    if not bool(b.isfinite()[finite].all()):
        return _WHOLLY
    a, b = torch.where(finite, a, 0.0), torch.where(finite, b, 0.0)
    # A result of which rounding alone is left is measured by the others of its kind.
    usual_norm = usual * math.sqrt(a.numel())
    norm, largest = max(_norm(a), eps * usual_norm), max(float(a.abs().max()), eps * usual)
    if not norm:
        return _WHOLLY if bool(b.any()) else Apart()
    difference = b - a
    scale = float((difference / norm * (a / norm)).sum())
    least = eps * max(1.0, usual_norm / norm)
    return Apart(_norm(difference) / norm, float(difference.abs().max()) / largest, abs(scale), least)


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _numbers(tensor: Tensor) -> Tensor:
    """As real numbers of a type with which can be reckoned: float64 where the device has it."""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return real.to(torch.float64 if accelerators.has_float64(real.device) else torch.float32)


def _norm(numbers: Tensor) -> float:
    return float(torch.linalg.vector_norm(numbers))
