"""A rank's time as a function of its share: a line, fitted robustly to what was measured at a few sizes.

``seconds(n) = a + b * n``, an overhead and a price per sample. The overhead cannot be left out: one
proportional step that ignores it lands 12 to 27 % above the optimum at usual sizes.

The slope is that of Theil and Sen (Sen, J. Am. Stat. Assoc. 63, 1968), the weighted median of the slopes
between all pairs of sizes, shrunk to a prior where the sizes are too few or too close together to tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

LEAST_VARYING = 0.05
"""No device is believed to take more samples for nothing."""

DRIFT = 0.02
"""Relative drift that old observations may hide, reached half way after ``DRIFT_AGE`` observations."""
DRIFT_AGE = 100
CLIFF = 0.05
"""Relative height from which a size above its line is a cliff."""
CLIFF_AGE = 150
"""Observations after which one is tried again: what seemed to be one may have been a bad moment."""
CLIFF_REPEATS = 3

MEDIAN_VARIANCE = math.pi / 2
"""Variance of the median of normal values over that of their mean."""


@dataclass(frozen=True)
class Line:
    """Seconds as a non-decreasing function of the number of samples; an idle rank costs nothing."""

    overhead_seconds: float
    seconds_per_sample: float
    cliffs: tuple[tuple[int, float], ...] = ()
    """(size, seconds) below which no share of at least that size falls."""

    def __call__(self, n: int) -> float:
        if n <= 0:
            return 0.0
        seconds = self.overhead_seconds + self.seconds_per_sample * n
        for size, least in self.cliffs:
            if size <= n and least > seconds:
                seconds = least
        return seconds

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> Line:
        """Undoes what JSON makes of a line: lists."""
        overhead, price, cliffs = values
        return cls(overhead, price, tuple((size, least) for size, least in cliffs))

    def scaled(self, factor: float) -> Line:
        """The same device, ``factor`` times as slow."""
        cliffs = tuple((size, least * factor) for size, least in self.cliffs)
        return Line(self.overhead_seconds * factor, self.seconds_per_sample * factor, cliffs)


@dataclass(frozen=True)
class Shape:
    """What is believed of a device before it is measured: the part of its time that grows with the share.

    A change of speed leaves the ratio of overhead to price about as it was, so that ratio is carried over.
    """

    overhead_samples: float | None = None
    """``a / b``, the samples that cost as much as the overhead; None: nothing is known but what is usual."""
    spread: float = 0.0
    """Standard error of its logarithm, where it is known."""

    USUAL_PART: ClassVar[float] = 0.8
    USUAL_ERROR: ClassVar[float] = 0.25
    LEAST_ERROR: ClassVar[float] = 0.01
    CHANGE_SPREAD: ClassVar[float] = 0.2
    """What a change of speed adds to the spread."""
    MOST_SPREAD: ClassVar[float] = 1.5

    def growing(self, n: float) -> tuple[float, float]:
        """``b * n / (a + b * n)`` and its standard error."""
        if self.overhead_samples is None:
            return self.USUAL_PART, self.USUAL_ERROR
        part = n / (n + self.overhead_samples)
        return part, max(self.LEAST_ERROR, self.spread * part * (1.0 - part))

    @classmethod
    def of(cls, fit: Fit) -> Shape:
        """What a fit of before a change of speed tells of the time after it."""
        grows = fit.line.seconds_per_sample * fit.center
        seconds = fit.line.overhead_seconds + grows
        part = max(LEAST_VARYING, min(grows / seconds, 1.0 - LEAST_VARYING))
        measured = fit.slope_error * fit.center / seconds / (part * (1.0 - part))
        spread = min(math.hypot(cls.CHANGE_SPREAD, measured), cls.MOST_SPREAD)
        return cls(fit.center * (1.0 - part) / part, spread)


class Point(NamedTuple):
    """What was measured at one size."""

    n: int
    seconds: float
    repeats: int
    age: int


@dataclass(frozen=True)
class Fit:
    """A line with its standard errors, which grow away from the sizes that were measured."""

    line: Line
    center: float
    """Weighted mean of the measured sizes, where the line is known best."""
    level_error: float
    """Standard error of the seconds at ``center``."""
    slope_error: float
    """Standard error of ``line.seconds_per_sample``."""
    sigma: float
    """Relative standard deviation of a single observation."""

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> Fit:
        """Undoes what JSON makes of a fit: lists."""
        line, *errors = values
        return cls(Line.from_values(line), *errors)

    def error(self, n: int) -> float:
        """Standard error in seconds of ``line(n)``."""
        return math.hypot(self.level_error, self.slope_error * (n - self.center))


def weighted_median(pairs: Iterable[tuple[float, float]]) -> float:
    """The value of (value, weight) pairs at which half of the weight is reached."""
    ordered = sorted(pairs)
    left = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        left -= weight
        if left <= 0:
            return value
    return ordered[-1][0]


def _weight(point: Point, sigma: float) -> float:
    noise = sigma * sigma * MEDIAN_VARIANCE / point.repeats
    drift = DRIFT * point.age / (point.age + DRIFT_AGE)
    return 1.0 / ((noise + drift * drift) * point.seconds * point.seconds)


def _theil_sen(points: Sequence[Point], weights: Sequence[float]) -> float:
    slopes = []
    for i, left in enumerate(points):
        for j in range(i + 1, len(points)):
            apart = points[j].n - left.n
            slope = (points[j].seconds - left.seconds) / apart
            slopes.append((slope, weights[i] * weights[j] * apart * apart))
    return weighted_median(slopes) if slopes else 0.0


def _cliffs(
    points: Sequence[Point], line: Line, sigma: float, memory: float
) -> tuple[tuple[int, float], ...]:
    """Sizes far above the line that were seen often and of late, and no larger one of which was less."""
    seen = [point for point in points if point.repeats >= CLIFF_REPEATS]

    def stands_out(point: Point) -> bool:
        error = math.sqrt(memory * sigma * sigma * MEDIAN_VARIANCE / point.repeats)
        return point.seconds > line(point.n) * (1 + max(CLIFF, 3 * error)) and point.age < CLIFF_AGE

    def holds(point: Point) -> bool:
        return all(other.seconds > (1 - CLIFF) * point.seconds for other in seen if other.n > point.n)

    return tuple((point.n, point.seconds) for point in seen if stands_out(point) and holds(point))


def fit_line(points: Sequence[Point], sigma: float, shape: Shape, memory: float = 1.0) -> Fit:
    """The line through ``points`` (of distinct sizes), its slope shrunk to the prior by their precisions.

    Args:
        points: At least one, the sizes distinct.
        sigma: Relative standard deviation of one observation.
        shape: The prior.
        memory: Successive observations that are worth one. It widens the error of the level alone: between sizes that
            take turns noise that lasts makes no difference.
    """
    weights = [_weight(point, sigma) for point in points]
    total = sum(weights)
    center = sum(w * point.n for w, point in zip(weights, points, strict=True)) / total
    level = sum(w * point.seconds for w, point in zip(weights, points, strict=True)) / total
    unit = level / center
    measured = sum(w * (point.n - center) ** 2 for w, point in zip(weights, points, strict=True))
    part, part_error = shape.growing(center)
    assumed = 1.0 / (part_error * unit) ** 2
    slope = (measured * _theil_sen(points, weights) + assumed * part * unit) / (measured + assumed)
    slope = max(LEAST_VARYING * unit, min(slope, unit))
    level = weighted_median(
        (point.seconds - slope * (point.n - center), w) for w, point in zip(weights, points, strict=True)
    )
    line = Line(max(0.0, level - slope * center), slope)
    line = replace(line, cliffs=_cliffs(points, line, sigma, memory))
    return Fit(line, center, math.sqrt(memory / total), math.sqrt(1.0 / (measured + assumed)), sigma)
