"""Costs of a step from trials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import mean, median, pstdev

from evener.balance.time_model import Line
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.costs import StepCosts, part_of
from evener.tools.plan.trial import DISTURBED, Trial

OF_ALL = 4
"""The number of differences between trials of one candidate that those of all candidates together weigh as much as."""


def costs_of(trials: Sequence[Trial], spread: float) -> StepCosts:
    """Returns the costs of the candidate of ``trials``: a few with each of several batch sizes.

    What comes after the passes is what the lines of passes and input leave of the line of whole steps. So the terms add
    up to steps as they were, though the slowest rank is another one in each trial, and no rank's line is that of the
    slowest.

    Args:
        spread: That of all candidates (`spread_of`). It counts as much as ``OF_ALL`` differences of this one, for few
            are known of each.
    """
    repeats, trials = _repeats(trials), undisturbed(trials)
    ranks, parts = trials[0].candidate.ranks, len(trials[0].shares)
    weights = [each.seconds**-2 for each in trials]  # errors count in per cent of the step
    compute = tuple(
        line_through([(_own(each, rank), each.compute[rank]) for each in trials], weights)
        for rank in range(ranks)
    )

    def slowest(trial: Trial) -> float:
        return max(line(_own(trial, rank)) for rank, line in enumerate(compute))

    inputs = line_through([(max(each.shares), max(each.input)) for each in trials], weights)
    steps = line_through([(each.batch_size, each.seconds) for each in trials], weights)
    rest = [
        (each.batch_size, steps(each.batch_size) - slowest(each) - inputs(max(each.shares)))
        for each in trials
    ]
    within = median(pstdev(each.steps) / each.seconds / math.sqrt(len(each.steps)) for each in trials)
    repeated = _root_mean_square([spread] * OF_ALL + repeats)
    return StepCosts(
        compute,
        parts,
        rest=difference_through(rest, weights),
        input=inputs,
        spread=math.hypot(repeated, within, _root_mean_square(off_line(trials))),
        setup=median(each.setup for each in trials),
        sizes=tuple(sorted({each.batch_size for each in trials})),
    )


def off_line(trials: Sequence[Trial]) -> list[float]:
    """Returns for each trial of a candidate how far its step is from a line of the batch size, in parts of the step.
    Not 0 where a machine does not take a line, or was disturbed."""
    points = [(each.batch_size, each.seconds) for each in trials]
    line = line_through(points, [seconds**-2 for _, seconds in points])
    return [line(size) / seconds - 1 for size, seconds in points]


def unclear(trials: Sequence[Trial]) -> list[tuple[Candidate, int]]:
    """Returns the candidates and batch sizes whose trials have taken different times, or are off the line of the
    candidate's others: trials that may have been disturbed."""
    found = list[tuple[Candidate, int]]()
    for candidate in dict.fromkeys(each.candidate for each in trials):
        own = [each for each in trials if each.candidate == candidate]
        wild = {each.batch_size for each, off in zip(own, off_line(own), strict=True) if abs(off) > DISTURBED}
        wild |= {each.batch_size for each in own if each not in undisturbed(own)}
        found += [(candidate, size) for size in dict.fromkeys(t.batch_size for t in own) if size in wild]
    return found


def undisturbed(trials: Sequence[Trial]) -> list[Trial]:
    """Returns the trials of a candidate that are about as fast as the fastest with the same batch size."""
    fastest = dict[int, Trial]()
    for each in trials:
        known = fastest.get(each.batch_size)
        fastest[each.batch_size] = each if known is None or each.seconds < known.seconds else known
    return [each for each in trials if each.seconds <= (1 + DISTURBED) * fastest[each.batch_size].seconds]


def line_through(points: Sequence[tuple[float, float]], weights: Sequence[float] | None = None) -> Line:
    """Returns the line through points of samples and seconds, by least squares. Neither of its numbers is negative.
    Through one point it is in proportion to the samples.

    Args:
        weights: What the square of a point's error counts. Equal by default.
    """
    pairs = zip(points, weights or [1.0] * len(points), strict=True)
    known = [(x, y, weight) for (x, y), weight in pairs if x > 0]
    if not known:
        return Line(0.0, 0.0)
    whole = sum(weight for *_, weight in known)
    mean_x, mean_y = (sum(point[place] * point[2] for point in known) / whole for place in (0, 1))
    over = sum(weight * (x - mean_x) ** 2 for x, _, weight in known)
    slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in known) / over if over else mean_y / mean_x
    if slope < 0:
        return Line(mean_y, 0.0)
    if mean_y < slope * mean_x:
        return Line(0.0, sum(w * x * y for x, y, w in known) / sum(w * x * x for x, _, w in known))
    return Line(mean_y - slope * mean_x, slope)


def difference_through(points: Sequence[tuple[float, float]], weights: Sequence[float]) -> Line:
    """Returns the line by least squares through points that are differences of lines: its numbers may be negative.
    Through one point, or several with the same samples, it is constant."""
    whole = sum(weights)
    mean_x, mean_y = (
        sum(w * point[at] for w, point in zip(weights, points, strict=True)) / whole for at in (0, 1)
    )
    over = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    along = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    slope = along / over if over else 0.0
    return Line(mean_y - slope * mean_x, slope)


def spread_of(tried: Iterable[Sequence[Trial]]) -> float:
    """Returns the relative difference of two trials that are the same, as the root of its mean square.

    Args:
        tried: The trials of each candidate.
    """
    return _root_mean_square([each for trials in tried for each in _repeats(trials)])


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(mean(each**2 for each in values)) if values else 0.0


def repeat_spread(first: Trial, again: Trial) -> float:
    """Returns the relative difference of two trials of the same candidate and batch size."""
    return abs(math.log(again.seconds / first.seconds))


def _repeats(trials: Sequence[Trial]) -> list[float]:
    """Returns the differences of successive trials with the same batch size. A run later on differs as much."""
    sizes = {each.batch_size for each in trials}
    return [
        repeat_spread(*pair) for size in sizes for pair in pairwise(t for t in trials if t.batch_size == size)
    ]


def _own(trial: Trial, rank: int) -> int:
    return trial.shares[part_of(rank, len(trial.shares), trial.candidate.ranks)]
