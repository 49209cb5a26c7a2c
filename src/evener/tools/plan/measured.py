"""Costs of a step from trials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from statistics import mean, median, pstdev

import numpy as np

from evener.balance.time_model import Line
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.costs import StepCosts, part_of
from evener.tools.plan.trial import DISTURBED, OTHER_START, Trial

UNREPEATED_SPREAD = 0.06
"""The relative difference of two trials that are the same, where there was no time to repeat any: half of the cases on
a machine of 2 cores differed by more than 4 %."""
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
    weights, pieces = _weights(trials), _pieces(trials)
    compute = tuple(_passes(rank, trials, pieces, weights) for rank in range(ranks))
    inputs = line_through([(max(each.shares), max(each.input)) for each in trials], weights)
    left = list[float]()
    for each, count, step in zip(trials, pieces, _whole_steps(trials), strict=True):
        own = [(line, _own(each, rank)) for rank, line in enumerate(compute)]
        passes = max(line.overhead_seconds * count + line.seconds_per_sample * n for line, n in own)
        left.append(step - passes - inputs(max(each.shares)))
    piece, rest = _rest(trials, left, weights)
    within = median(pstdev(each.steps) / each.seconds / math.sqrt(len(each.steps)) for each in trials)
    repeated = _root_mean_square([spread] * OF_ALL + repeats)
    return StepCosts(
        compute,
        parts,
        rest=rest,
        input=inputs,
        spread=math.hypot(repeated, within, _root_mean_square(off_line(trials))),
        setup=median(each.setup for each in trials),
        pieces=most_pieces(trials),
        piece=piece,
        sizes=tuple(sorted({each.batch_size for each in trials})),
    )


def most_pieces(trials: Sequence[Trial]) -> int:
    """Returns the most micro-batches into which a pipeline cuts a share. 1 if it cuts none, or if each had one sample
    in all trials: then steps take a line of the samples.

    Below that number a share has a micro-batch for each sample, and above it micro-batches have more samples. So a step
    takes one line of the samples below, and a flatter one above.
    """
    most = max(each.pieces for each in trials)
    return most if any(max(each.shares) > most for each in trials) else 1


def off_line(trials: Sequence[Trial]) -> list[float]:
    """Returns for each trial of a candidate how far its step is from what is fitted to all of them, in parts of the
    step: a line of the batch size, and of a pipeline's micro-batches. Not 0 where a machine does not take a line, or
    was disturbed."""
    fitted = _whole_steps(trials)
    return [step / each.seconds - 1 for step, each in zip(fitted, trials, strict=True)]


def _weights(trials: Sequence[Trial]) -> list[float]:
    return [each.seconds**-2 for each in trials]  # errors count in per cent of the step


def _pieces(trials: Sequence[Trial]) -> list[int]:
    most = most_pieces(trials)
    return [min(most, max(each.shares)) for each in trials]


def _passes(rank: int, trials: Sequence[Trial], pieces: Sequence[int], weights: Sequence[float]) -> Line:
    """Returns the passes of a rank with one micro-batch, by its samples."""
    given = [*zip(trials, pieces, weights, strict=True)]
    points = [(_own(each, rank) / count, each.compute[rank] / count) for each, count, _ in given]
    return line_through(points, [weight * count**2 for _, count, weight in given])


def _whole_steps(trials: Sequence[Trial]) -> list[float]:
    """Returns the seconds of a step that are fitted to the trials of a candidate, for each of them."""
    sizes, seconds = [each.batch_size for each in trials], [each.seconds for each in trials]
    if most_pieces(trials) == 1:
        line = line_through([*zip(sizes, seconds, strict=True)], _weights(trials))
        return [line(size) for size in sizes]
    terms = [*zip(_pieces(trials), sizes, [1] * len(sizes), strict=True)]
    found = nonnegative_fit(terms, seconds, _weights(trials))
    return [sum(number * term for number, term in zip(found, row, strict=True)) for row in terms]


def _rest(trials: Sequence[Trial], left: Sequence[float], weights: Sequence[float]) -> tuple[float, Line]:
    """Returns what each micro-batch adds to passes and input, and the line of what else does, by the batch."""
    if most_pieces(trials) == 1 or len({each.batch_size for each in trials}) < 3:
        return 0.0, difference_through(
            [(t.batch_size, y) for t, y in zip(trials, left, strict=True)], weights
        )
    terms = [(count, each.batch_size, 1) for count, each in zip(_pieces(trials), trials, strict=True)]
    piece, sample, fixed = least_squares(terms, left, weights)
    return piece, Line(fixed, sample)


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
    """Returns the trials of a candidate that are about as fast as the fastest of the same start and batch size.

    The cores of a virtual machine may be slower by a fifth or a half for tens of seconds, and a run may fall into
    either time. So a start does not count as disturbed because another was faster, unless by ``OTHER_START``.
    """
    fastest, of_all = dict[tuple[int, int], float](), dict[int, float]()
    for each in trials:
        size, key = each.batch_size, (each.start, each.batch_size)
        fastest[key] = min(each.seconds, fastest.get(key, math.inf))
        of_all[size] = min(each.seconds, of_all.get(size, math.inf))
    return [
        each
        for each in trials
        if each.seconds <= (1 + DISTURBED) * fastest[each.start, each.batch_size]
        and each.seconds <= (1 + OTHER_START) * of_all[each.batch_size]
    ]


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


def least_squares(
    terms: Sequence[Sequence[float]], values: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Returns the factors of the terms, one row for each value, with the least squares of errors."""
    root = np.sqrt(np.asarray(weights, dtype=float))
    rows = np.asarray(terms, dtype=float) * root[:, None]
    return [float(each) for each in np.linalg.lstsq(rows, np.asarray(values) * root, rcond=None)[0]]


def nonnegative_fit(
    terms: Sequence[Sequence[float]], values: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Returns the factors of the terms, none of them negative, with the least squares of errors: the best of the fits
    of some terms alone. Of equally good ones it is the first with the fewest terms."""
    number = len(terms[0])
    best, least = [0.0] * number, sum(w * y**2 for w, y in zip(weights, values, strict=True))
    for kept in (each for count in range(1, number + 1) for each in combinations(range(number), count)):
        found = least_squares([[row[at] for at in kept] for row in terms], values, weights)
        factors = [found[kept.index(at)] if at in kept else 0.0 for at in range(number)]
        fitted = [sum(factor * term for factor, term in zip(factors, row, strict=True)) for row in terms]
        error = sum(w * (x - y) ** 2 for w, x, y in zip(weights, fitted, values, strict=True))
        if min(found) >= 0 and error < least * (1 - 1e-6) - 1e-12:
            best, least = factors, error
    return best


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
