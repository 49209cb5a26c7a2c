"""A rank's time as a function of its share: a line, fitted robustly to times measured at a few sizes.

``seconds(n) = a + b * n``, an overhead and a time per sample. The overhead cannot be ignored: shares that are adjusted
once in proportion to speed, without it, are 12 to 27 % slower than the optimum at usual sizes.

The slope is that of Theil and Sen (Sen, J. Am. Stat. Assoc. 63, 1968): the weighted median of the slopes
between all pairs of sizes, shrunk to a prior if the sizes are too few or too close together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

LEAST_VARYING = 0.05
"""Least part of the time that is assumed to grow with the share: no device computes samples at no cost."""

DRIFT = 0.02
"""Assumed relative drift since an old observation; half of it after ``DRIFT_AGE`` observations."""
DRIFT_AGE = 100
CLIFF = 0.05
"""A size is a cliff only if its time is above the line by more than this fraction."""
CLIFF_AGE = 150
"""Observations after which a cliff is forgotten and tried again: it may have been a temporary slowdown."""
CLIFF_REPEATS = 3

MEDIAN_VARIANCE = math.pi / 2
"""Ratio of the variance of the median of normal values to that of their mean."""


@dataclass(frozen=True)
class Line:
    """Seconds as a non-decreasing function of the number of samples; 0 seconds for 0 samples."""

    overhead_seconds: float
    seconds_per_sample: float
    cliffs: tuple[tuple[float, float], ...] = ()
    """Pairs (size, seconds): a share of at least this size takes at least these seconds."""

    def __call__(self, n: float) -> float:
        if n <= 0:
            return 0.0
        seconds = self.overhead_seconds + self.seconds_per_sample * n
        for size, least in self.cliffs:
            if size <= n and least > seconds:
                seconds = least
        return seconds

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> Line:
        """Creates a line from nested lists, as JSON stores it."""
        overhead, price, cliffs = values
        return cls(overhead, price, tuple((size, least) for size, least in cliffs))

    def scaled(self, factor: float) -> Line:
        """Returns the line of a device that is ``factor`` times as slow."""
        cliffs = tuple((size, least * factor) for size, least in self.cliffs)
        return Line(self.overhead_seconds * factor, self.seconds_per_sample * factor, cliffs)


@dataclass(frozen=True)
class Shape:
    """Prior of a device's line: the part of the time that grows with the share.

    A change of speed hardly changes the ratio of overhead to time per sample, so this ratio is carried over.
    """

    overhead_samples: float | None = None
    """``a / b``: how many samples cost as much as the overhead; None if unknown."""
    spread: float = 0.0
    """Standard error of the logarithm of ``overhead_samples``."""

    USUAL_PART: ClassVar[float] = 0.8
    USUAL_ERROR: ClassVar[float] = 0.25
    LEAST_ERROR: ClassVar[float] = 0.01
    CHANGE_SPREAD: ClassVar[float] = 0.2
    """Standard error that a change of speed adds to the spread."""
    MOST_SPREAD: ClassVar[float] = 1.5

    def growing(self, n: float) -> tuple[float, float]:
        """Returns ``b * n / (a + b * n)`` and its standard error."""
        if self.overhead_samples is None:
            return self.USUAL_PART, self.USUAL_ERROR
        part = n / (n + self.overhead_samples)
        return part, max(self.LEAST_ERROR, self.spread * part * (1.0 - part))

    @classmethod
    def from_fit(cls, fit: Fit) -> Shape:
        """Derives the prior after a change of speed from the fit before it."""
        grows = fit.line.seconds_per_sample * fit.center
        seconds = fit.line.overhead_seconds + grows
        part = max(LEAST_VARYING, min(grows / seconds, 1.0 - LEAST_VARYING))
        measured = fit.slope_error * fit.center / seconds / (part * (1.0 - part))
        spread = min(math.hypot(cls.CHANGE_SPREAD, measured), cls.MOST_SPREAD)
        return cls(fit.center * (1.0 - part) / part, spread)


class Point(NamedTuple):
    """Measurement at one size: samples, median seconds, number of observations, and observations since the last one."""

    n: float
    seconds: float
    repeats: int
    age: int


@dataclass(frozen=True)
class Fit:
    """A line with its standard errors, which grow away from the measured sizes."""

    line: Line
    center: float
    """Weighted mean of the measured sizes. The line's error is smallest there."""
    level_error: float
    """Standard error of the seconds at ``center``."""
    slope_error: float
    """Standard error of ``line.seconds_per_sample``."""
    sigma: float
    """Relative standard deviation of a single observation."""

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> Fit:
        """Creates a fit from nested lists, as JSON stores it."""
        line, *errors = values
        return cls(Line.from_values(line), *errors)

    def error(self, n: float) -> float:
        """Returns the standard error of ``line(n)`` in seconds."""
        return math.hypot(self.level_error, self.slope_error * (n - self.center))


def weighted_median(pairs: Iterable[tuple[float, float]]) -> float:
    """Returns the weighted median of (value, weight) pairs: the value at which half of the weight is reached."""
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
) -> tuple[tuple[float, float], ...]:
    """Returns the cliffs: sizes far above the line, observed often and recently, with no clearly faster larger size."""
    seen = [point for point in points if point.repeats >= CLIFF_REPEATS]

    def stands_out(point: Point) -> bool:
        error = math.sqrt(memory * sigma * sigma * MEDIAN_VARIANCE / point.repeats)
        return point.seconds > line(point.n) * (1 + max(CLIFF, 3 * error)) and point.age < CLIFF_AGE

    def holds(point: Point) -> bool:
        return all(other.seconds > (1 - CLIFF) * point.seconds for other in seen if other.n > point.n)

    return tuple((point.n, point.seconds) for point in seen if stands_out(point) and holds(point))


def fit_line(points: Sequence[Point], sigma: float, shape: Shape, memory: float = 1.0) -> Fit:
    """Fits a line to ``points``. The slope is the mean of measurement and prior, weighted by their precisions.

    Args:
        points: At least one point; the sizes must be distinct.
        sigma: Relative standard deviation of one observation.
        shape: The prior.
        memory: How many successive observations are worth one independent one. It increases only the error of the
            level: if sizes take turns, lasting noise does not affect the differences between them.
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
