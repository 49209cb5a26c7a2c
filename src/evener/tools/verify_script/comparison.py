"""Finds the first event at which the run on ranks differs from that on one device, and measures all differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from evener.tools.verify import rounding_floor as floors
from evener.tools.verify.comparison import LIMIT, size_of_error
from evener.tools.verify.rounding_floor import Numbers, PlaceKind
from evener.tools.verify_script.events import Event, Record, ScriptLine, What
from evener.tools.verify_script.printed_output import OutputComparison

_ALIKE = 1e-5
"""Relative tolerance for numbers that are equal on all ranks."""


@dataclass(frozen=True)
class Parting:
    """The first difference between two runs."""

    event: int
    """Index of the event. The number of all events stands for the end of the run."""
    kind: str
    """Kind of difference: ``course`` (a rank does something else), ``samples``, ``shape``, ``loss``, ``backward``,
    ``grad`` (the value given to ``torch.autograd.grad``), ``gradient``, ``weight``, ``buffer``, ``printed`` or
    ``replicas``.
    """
    line: ScriptLine
    names: tuple[str, ...] = ()
    """Parameters and buffers that differ, the worst first."""
    rank: int = 0
    """First rank that differs."""
    times: float = math.inf
    """Difference as a multiple of the floor; infinity if it has no measure."""
    texts: tuple[str, str] = ("", "")
    """Text that one device printed and that the rank printed, or descriptions of what they did."""
    between: bool = False
    """True if ranks differ from each other, which no rounding explains."""


@dataclass(frozen=True)
class ScriptRuns:
    """The runs that are compared."""

    reference: Record
    disturbed: Sequence[Record]
    divided: Sequence[Record]
    """Records of the divided run, by rank."""


@dataclass(frozen=True)
class ScriptComparison:
    """Result of a comparison."""

    partings: list[Parting]
    """First difference of each check, in the order of events. The runs agree if the list is empty."""
    times_floor: float
    """Largest of all differences, each as a multiple of its own floor."""
    noise: list[str] = field(default_factory=list)
    """Parameters whose gradient is rounding noise alone."""


def before_failure(runs: ScriptRuns) -> Parting | None:
    """Returns the first difference before the ranks failed. Returns None if there is none."""
    number = min(len(run.events) for run in (runs.reference, *runs.divided))
    if any(run.events[:number] and _is_open(run.events[number - 1]) for run in runs.divided):
        number -= 1
    cut = [
        replace(run, events=run.events[:number], printed=[], end={}, digest=str(rank))
        for rank, run in enumerate((runs.reference, *runs.disturbed, *runs.divided))
    ]
    others = len(cut) - len(runs.divided)
    found = compare(ScriptRuns(cut[0], cut[1:others], cut[others:])).partings
    return found[0] if found else _own_grad(cut[others:])


def _own_grad(divided: Sequence[Record]) -> Parting | None:
    """Returns a difference if the last event is a call of ``torch.autograd.grad`` for weights whose value differs
    between ranks. Returns None otherwise.
    """
    ends = [run.events[-1] for run in divided if run.events]
    if not ends or ends[0].what is not What.GRAD:
        return None
    rank = next((rank for rank, end in enumerate(ends) if values_part(ends[0], end)), None)
    return None if rank is None else Parting(len(divided[0].events) - 1, "grad", ends[0].line, rank=rank)


def _is_open(event: Event) -> bool:
    """Returns True if the event is an optimizer step that did not end."""
    return event.what is What.STEP and not event.weights


def compare(runs: ScriptRuns) -> ScriptComparison:
    """Compares all ranks with one device."""
    reference = runs.reference
    stops = [same_course(reference, other) for other in (*runs.disturbed, *runs.divided)]
    partings = [_course(runs, rank) for rank in range(len(runs.divided))]
    whole = all(stop is None for stop in stops)
    stop = None if whole else min(len(reference.events) if each is None else each for each in stops)
    measured = _measured(runs, stop)
    for rank, numbers in enumerate(measured.times):
        partings += [_between(runs, rank), _beyond(runs, numbers, rank)]
    partings += [_printed(runs), _replicas(runs)]
    found = sorted((each for each in partings if each is not None), key=lambda each: each.event)
    return ScriptComparison(found, measured.largest, measured.noise)


def same_course(reference: Record, other: Record) -> int | None:
    """Returns the index of the first event that is another one, or has other samples. Returns None if there is none."""
    for number, (a, b) in enumerate(zip_longest(reference.events, other.events)):
        if a is None or b is None or _course_of(a) != _course_of(b):
            return number
    return None


def _course_of(event: Event) -> tuple[object, ...]:
    mark = event.value if event.what is What.BATCH else 0.0
    return (*event.place, mark, event.dims, *((name, len(value)) for name, value in event.weights.items()))


def _course(runs: ScriptRuns, rank: int) -> Parting | None:
    reference, other = runs.reference.events, runs.divided[rank].events
    number = same_course(runs.reference, runs.divided[rank])
    if number is None:
        return None
    a = reference[number] if number < len(reference) else None
    b = other[number] if number < len(other) else None
    known = b or a
    assert known is not None
    texts = (_described(a), _described(b))
    if a is None or b is None or a.place != b.place:
        return Parting(number, "course", known.line, rank=rank, texts=texts)
    return Parting(number, "samples" if a.what is What.BATCH else "shape", a.line, rank=rank, texts=texts)


def _described(event: Event | None) -> str:
    return "the end of the script" if event is None else f"{event.what} at {event.line.described}"


@dataclass(frozen=True)
class _Measured:
    """Differences of each rank as multiples of their floors."""

    times: list[Numbers]
    noise: list[str]

    @property
    def largest(self) -> float:
        values = [value for numbers in self.times for value in numbers.values()]
        return max(values, key=lambda value: math.inf if math.isnan(value) else value, default=0.0)


def _measured(runs: ScriptRuns, stop: int | None) -> _Measured:
    reference = runs.reference.trajectory(stop)
    disturbed = [floors.differences(reference, run.trajectory(stop)) for run in runs.disturbed]
    _, noise = floors.real_and_noise(reference, disturbed)
    eps = max(runs.reference.eps, 2.0**-52)
    found = floors.floor(reference, disturbed, noise, eps)
    return _Measured(
        [floors.times(floors.differences(reference, run.trajectory(stop)), found) for run in runs.divided],
        noise,
    )


def _between(runs: ScriptRuns, rank: int) -> Parting | None:
    """Returns the first event at which a rank's value or gradient differs from that of rank 0.

    The back-propagated value is that of the whole batch, and gradients are summed. So both have the same bits on all
    ranks, in any dtype. This check therefore finds differences that lie below the floor of half precision.
    """
    pairs = zip(runs.divided[0].events, runs.divided[rank].events, strict=False)
    for number, (a, b) in enumerate(pairs):
        if a.place != b.place:
            return None
        names = [name for name in (a.gradients | b.gradients) if gradients_part(a, b, name)]
        is_value = a.what in (What.LOSS, What.BACKWARD) and values_part(a, b)
        if is_value or names:
            kind = "gradient" if names else "backward" if a.what is What.BACKWARD else "loss"
            return Parting(number, kind, a.line, tuple(names), rank, between=True)
    return None


def values_part(a: Event, b: Event) -> bool:
    """Returns True if two ranks have different values."""
    both_nan = math.isnan(a.value) and math.isnan(b.value)
    return not both_nan and not math.isclose(a.value, b.value, rel_tol=_ALIKE)


def gradients_part(a: Event, b: Event, name: str) -> bool:
    """Returns True if two ranks have different gradients of a parameter."""
    x, y = a.gradients.get(name), b.gradients.get(name)
    if x is None or y is None or x.shape != y.shape:
        return x is not y
    return floors.distance(x, y) > _ALIKE * floors.norm(x)


_STAGES = {PlaceKind.LOSS: 0, PlaceKind.GRADIENT: 1, PlaceKind.BUFFER: 2, PlaceKind.WEIGHT: 2}


def _beyond(runs: ScriptRuns, times: Numbers, rank: int) -> Parting | None:
    """Returns the first event of a rank that lies beyond its floor."""
    beyond = [place for place, value in times.items() if not value <= LIMIT]
    if not beyond:
        return None
    first = min(beyond, key=lambda place: (place.step, _STAGES[place.kind]))
    same = [place for place in beyond if (place.step, place.kind) == (first.step, first.kind)]
    names = [place.name for place in sorted(same, key=lambda place: -size_of_error(times[place]))]
    events = runs.reference.events
    event = events[min(first.step, len(events) - 1)]
    kind = str(first.kind)
    if first.kind is PlaceKind.LOSS:
        kind, names = "backward" if event.what is What.BACKWARD else "loss", []
    worst = max(size_of_error(times[place]) for place in same)
    return Parting(first.step, kind, event.line, tuple(names), rank, worst)


def _printed(runs: ScriptRuns) -> Parting | None:
    """Returns the first printed line that differs between rank 0 and one device."""
    reference, other = runs.reference.printed, runs.divided[0].printed
    steady = [run.printed for run in runs.disturbed]
    for number, (a, b) in enumerate(zip_longest(reference, other)):
        if a is None or b is None:
            if any(len(run) != len(reference) for run in steady):
                return None
            known = a or b
            assert known is not None
            texts = (a.text if a else "nothing", b.text if b else "nothing")
            return Parting(known.event, "printed", known.line, texts=texts)
        texts_of_others = [run[number].text for run in steady if number < len(run)]
        eps = max(runs.reference.eps, 2.0**-52)
        differs = OutputComparison(a.text, texts_of_others, eps, len(runs.divided))
        if a.line != b.line or differs(b.text):
            return Parting(a.event, "printed", a.line, texts=(a.text, b.text))
    return None


def _replicas(runs: ScriptRuns) -> Parting | None:
    """Returns the first update after which the ranks' weights are not bitwise equal."""
    if len({run.digest for run in runs.divided}) == 1:
        return None
    first, *others = runs.divided
    for rank, other in enumerate(others, 1):
        for number, (a, b) in enumerate(zip(first.events, other.events, strict=False)):
            names = [
                name for name, value in a.weights.items() if not value.equal(b.weights.get(name, value + 1))
            ]
            if names:
                return Parting(number, "replicas", a.line, tuple(names), rank)
    names = [
        name
        for name, value in first.end.items()
        if any(not value.equal(other.end.get(name, value + 1)) for other in others)
    ]
    line = first.events[-1].line if first.events else ScriptLine("", 0)
    if not first.end:  # the runs were cut before their end
        return None
    return Parting(len(first.events), "replicas", line, tuple(names), 1)
