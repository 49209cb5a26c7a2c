"""One rank's speed, learned from the times of its own work while it trains.

The line that ``fit_line`` draws must stay right under four difficulties, each with its answer here or there:

===========================  =====================================================================
single slow steps            medians at each size, Theil-Sen slope (weighted median) between sizes
few sizes, close together    the slope is shrunk to a prior by its standard error, which is told
noise that lasts for steps   observations count by the variance of their means over several steps
a device that changes speed  CUSUM over winsorized residuals sees a jump after four observations;
                             older ones are dropped, the ratio of ``a`` to ``b`` stays as the prior
one that changes it back     what was known of the level before is kept, and taken up again
cliffs, sizes that cost      the running maximum: a larger share never costs less than what a
more than the line says      smaller one was measured at
===========================  =====================================================================

CUSUM: Page, Biometrika 41 (1954).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from itertools import pairwise
from typing import Any

from evener.balance.noise_model import USUAL_MEMORY, memory
from evener.balance.time_model import Fit, Point, Shape, fit_line

WINDOW = 48
"""Observations kept at each size."""
SIZES = 12
"""Sizes kept; the one not seen for longest goes first."""
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e9
REFIT = 16
"""Observations after which the line that new ones are compared with is fitted again ..."""
FIRST_FITS = (1, 2, 3, 4, 6, 8, 11)
"""... and after which it is at first, while each adds much."""

SETTLED = 6
"""Observations from which on a line serves to compare others with."""
CHANGE = 1.15
"""Least ratio of times that is a change of speed; less is a better estimate."""
NEAR, KNOWN = 1.05, 3
"""How far beyond known sizes, and after how many observations, a jump is a change of speed and not the line's error."""
REVISION = 12
"""Least observations that an estimate is made of anew."""
SAME = 0.08
"""Logarithm within which a level is one that was known before."""
HINT = 2.0
"""Standard errors of CUSUM from which a change is suspected."""
PRIOR_SIGMA = 0.05
PRIOR_SIGMA_COUNT = 6
STEP_TO_SIGMA = 2 * 1.4826 / math.sqrt(2)
"""Relative standard deviation over the median of ``|x - y| / (x + y)`` of two independent normal values."""


class Cusum:
    """Tells a change of level from single outliers, and since when.

    Residuals are clipped to 4 standard errors: four in a row beyond that raise the alarm, three never do, and
    what noise of an unchanged level adds up to stays far below it.
    """

    CLIP, SLACK, ALARM = 4.0, 0.75, 12.0

    def __init__(self) -> None:
        self.above, self.below = 0.0, 0.0
        self.length_above, self.length_below = 0, 0

    def update(self, residual: float, patience: float = 1.0) -> int:
        """Number of latest residuals that belong to a new level: 0 while there is none."""
        clipped = max(-self.CLIP, min(self.CLIP, residual))
        self.above = max(0.0, self.above + clipped - self.SLACK)
        self.below = max(0.0, self.below - clipped - self.SLACK)
        self.length_above = self.length_above + 1 if self.above else 0
        self.length_below = self.length_below + 1 if self.below else 0
        if max(self.above, self.below) <= self.ALARM * patience:
            return 0
        return self.length_above if self.above > self.below else self.length_below


@dataclass
class _Size:
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    seen: int = 0


class SpeedModel:
    """One rank's ``seconds(n) = a + b * n``, kept up to date by ``observe``.

    Deterministic: the same observations in the same order give the same bits, whatever was asked in between.
    """

    def __init__(self) -> None:
        self._memory, self._prior_sigma = USUAL_MEMORY, PRIOR_SIGMA
        self._shelf: tuple[Fit, dict[int, _Size]] | None = None
        self._start(Shape())

    def _start(self, shape: Shape) -> None:
        self._shape = shape
        self._sizes: dict[int, _Size] = {}
        self._recent: deque[tuple[int, float]] = deque(maxlen=4 * WINDOW)
        self._count = 0
        self._cusum = Cusum()
        self._baseline: Fit | None = None
        self._latest: Fit | None = None

    def observe(self, n: int, seconds: float, patience: float = 1.0) -> float | None:
        """Learns that ``n`` samples took ``seconds`` of the rank's own work.

        An empty share and a time that no clock can have measured (zero, not finite) are ignored.

        Args:
            patience: How many times as much must speak for a change of speed as usually.

        Returns:
            New time over old, when the rank has just been found to have changed its speed; else None.
        """
        if n <= 0 or not LEAST_SECONDS <= seconds <= MOST_SECONDS:
            return None
        before = self._baseline
        new_level = self._cusum.update(self._surprise(before, n, seconds), patience) if before else 0
        self._recent.append((n, seconds))
        if before and new_level and self._knew(n, new_level):
            return self._start_over(before, new_level)
        self._add(n, seconds)
        if new_level:  # a share that was never tried costs more or less than the line said
            self._cusum = Cusum()
            self._refit()
        elif self._count in FIRST_FITS or self._count % REFIT == 0:
            self._refit()
        return None

    def residual(self, n: int, seconds: float) -> float | None:
        """Logarithm of the time over what the line says; None where there is no time, or no line to rely on."""
        if self._baseline is None or self._count < SETTLED or n <= 0:
            return None
        if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
            return None
        return math.log(seconds / self._baseline.line(n))

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return bool(self._sizes)

    @property
    def seems_faster(self) -> bool:
        """Whether the last observations hint at a gain in speed that is not established yet."""
        return self._cusum.below > HINT

    @property
    def sigma(self) -> float:
        """Robust relative standard deviation of a single observation."""
        return self.fit().sigma

    def predict(self, n: int) -> float:
        """Seconds for ``n`` samples. Raises ValueError before the first observation."""
        return self.fit().line(n)

    def error(self, n: int) -> float:
        """Standard error of ``predict(n)`` in seconds; it grows away from the sizes that were observed."""
        return self.fit().error(n)

    def fit(self) -> Fit:
        """The line as of the last observation. Raises ValueError before the first."""
        if self._latest is None:
            if not self._sizes:
                raise ValueError("no time can be predicted before one was observed: call observe first")
            points = [
                Point(n, statistics.median(size.seconds), len(size.seconds), self._count - size.seen)
                for n, size in sorted(self._sizes.items())
            ]
            self._latest = fit_line(points, self._robust_sigma(), self._shape, self._memory)
        return self._latest

    def expect(self, fit: Fit) -> None:
        """Begins anew with a device that was once like ``fit``; nothing of it has been observed."""
        self._shelf = None
        self._start(Shape.of(fit))
        self._prior_sigma = fit.sigma

    def state_dict(self) -> dict[str, Any]:
        """All that was learned, as plain values that JSON can hold."""
        return {
            "sizes": _size_values(self._sizes),
            "recent": [list(pair) for pair in self._recent],
            "count": self._count,
            "shape": list(astuple(self._shape)),
            "cusum": dict(vars(self._cusum)),
            "baseline": self._baseline and list(astuple(self._baseline)),
            "memory": self._memory,
            "prior_sigma": self._prior_sigma,
            "shelf": self._shelf and [list(astuple(self._shelf[0])), _size_values(self._shelf[1])],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues exactly where ``state_dict`` was taken."""
        self._start(Shape(*state["shape"]))
        self._sizes = _sizes_of(state["sizes"])
        self._recent.extend((n, seconds) for n, seconds in state["recent"])
        self._count = state["count"]
        vars(self._cusum).update(state["cusum"])
        self._baseline = Fit.from_values(state["baseline"]) if state["baseline"] else None
        # A state of a version that knew no more goes on with what is usual.
        self._memory = state.get("memory", USUAL_MEMORY)
        self._prior_sigma = state.get("prior_sigma", PRIOR_SIGMA)
        shelf = state.get("shelf")
        self._shelf = (Fit.from_values(shelf[0]), _sizes_of(shelf[1])) if shelf else None

    def _add(self, n: int, seconds: float) -> None:
        if n not in self._sizes and len(self._sizes) == SIZES:
            del self._sizes[min(self._sizes, key=lambda size: self._sizes[size].seen)]
        self._count += 1
        size = self._sizes.setdefault(n, _Size())
        size.seconds.append(seconds)
        size.seen = self._count
        self._latest = None

    def _refit(self) -> None:
        """Compares what comes with the line as it is now, and counts observations by how alike neighbours are."""
        fit = self.fit()
        residuals = [math.log(seconds / fit.line(n)) / fit.sigma for n, seconds in self._recent]
        self._memory, self._latest = memory(residuals), None
        self._baseline = self.fit()

    def _start_over(self, before: Fit, length: int) -> float | None:
        """Drops all but the last observations; returns new over old time at the last size, if that is a change."""
        last, sizes, recent = self._recent[-1][0], self._sizes, list(self._recent)
        self._begin_with(recent[-length:], before)
        fit = self.fit()
        ratio = fit.line(last) / before.line(last)
        if max(ratio, 1.0 / ratio) < CHANGE:
            self._begin_with(recent[-max(length, REVISION) :], before)
            self._baseline = self.fit()
            return None
        if self._shelf is not None and self._is_back(self._shelf[0]):
            self._take_up(self._shelf)
        self._shelf = before, sizes
        self._baseline = self.fit()
        return self._baseline.line(last) / before.line(last)

    def _knew(self, n: int, length: int) -> bool:
        """Whether ``n`` was within the sizes that were known before the last ``length`` observations."""
        earlier = [size for size, _ in self._recent][:-length]
        return len(earlier) >= KNOWN and min(earlier) / NEAR <= n <= max(earlier) * NEAR

    def _begin_with(self, kept: Sequence[tuple[int, float]], before: Fit) -> None:
        self._start(Shape.of(before))
        self._prior_sigma = before.sigma
        self._recent.extend(kept)
        for n, seconds in kept:
            self._add(n, seconds)

    def _is_back(self, known: Fit) -> bool:
        """Whether the last observations are at a level that was known before."""
        apart = statistics.median(math.log(seconds / known.line(n)) for n, seconds in self._recent)
        return abs(apart) < max(SAME, 2.0 * known.sigma / math.sqrt(len(self._recent)))

    def _take_up(self, shelf: tuple[Fit, dict[int, _Size]]) -> None:
        self._sizes = shelf[1]
        self._count = max(size.seen for size in self._sizes.values())
        for n, seconds in self._recent:
            self._add(n, seconds)

    def _surprise(self, fit: Fit, n: int, seconds: float) -> float:
        """The observation's distance from the line in standard errors, of the noise and of the line together."""
        expected = fit.line(n)
        noise = fit.sigma * math.sqrt(max(1.0, self._memory / USUAL_MEMORY))
        return math.log(seconds / expected) / math.hypot(noise, fit.error(n) / expected)

    def _robust_sigma(self) -> float:
        """From differences of successive times at one size, which a drift or a wrong level does not widen."""
        steps = [
            abs(second - first) / (first + second)
            for size in self._sizes.values()
            for first, second in pairwise(size.seconds)
        ]
        measured = STEP_TO_SIGMA * statistics.median(steps) if steps else 0.0
        prior = self._prior_sigma
        squares = len(steps) * measured * measured + PRIOR_SIGMA_COUNT * prior * prior
        return math.sqrt(squares / (len(steps) + PRIOR_SIGMA_COUNT))


def _size_values(sizes: dict[int, _Size]) -> list[Any]:
    return [[n, list(size.seconds), size.seen] for n, size in sizes.items()]


def _sizes_of(values: Sequence[Any]) -> dict[int, _Size]:
    return {n: _Size(deque(seconds, WINDOW), seen) for n, seconds, seen in values}
