"""Learns one rank's speed from its compute times during training.

The line that ``fit_line`` fits must stay right under these difficulties:

===========================  =====================================================================
single slow steps            medians at each size, Theil-Sen slope (weighted median) between sizes
few sizes, close together    the slope is shrunk to a prior by its standard error
noise that lasts for steps   observations count by the variance of their means over several steps
a device that changes speed  CUSUM over winsorized residuals detects a jump after four
                             observations; older ones are dropped, and the ratio of ``a`` to ``b``
                             becomes the prior
one that changes it back     the observations at the earlier speed are kept and used again
cliffs, sizes that cost      the running maximum: a larger share never costs less than a smaller
more than the line says      one was measured to cost
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
"""Number of observations kept at each size."""
SIZES = 12
"""Number of sizes kept. The one not observed for longest is dropped first."""
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e9
SIZE_RATIO = 1.1
"""Ratio of neighbouring sizes to which costs are rounded."""
REFIT = 16
"""The baseline, with which new observations are compared, is refitted each time after this many observations."""
FIRST_FITS = (1, 2, 3, 4, 6, 8, 11)
"""At first the baseline is refitted after these numbers of observations, because each adds much."""

SETTLED = 6
"""Least number of observations for `SpeedModel.residual`."""
CHANGE = 1.15
"""Least ratio of times that counts as a change of speed. A smaller one counts as a better estimate."""
NEAR, KNOWN = 1.05, 3
"""A jump is a change of speed, and not the line's error, only at sizes within this factor of the known ones, and only
after this many observations."""
REVISION = 12
"""Least number of latest observations from which an estimate is made anew."""
SAME = 0.08
"""Largest difference in the logarithm of times at which a speed counts as the one known before."""
HINT = 2.0
"""Value of CUSUM, in standard errors, above which a change is suspected."""
PRIOR_SIGMA = 0.05
PRIOR_SIGMA_COUNT = 6
STEP_TO_SIGMA = 2 * 1.4826 / math.sqrt(2)
"""Relative standard deviation over the median of ``|x - y| / (x + y)`` of two independent normal values."""


class Cusum:
    """Detects a change of level, and when it began, despite single outliers.

    Residuals are clipped to 4 standard errors: four in a row beyond that raise the alarm, three never do, and
    the sum of noise at an unchanged level stays far below it.
    """

    CLIP, SLACK, ALARM = 4.0, 0.75, 12.0

    def __init__(self) -> None:
        self.above, self.below = 0.0, 0.0
        self.length_above, self.length_below = 0, 0

    def update(self, residual: float, patience: float = 1.0) -> int:
        """Adds a residual. Returns the number of latest residuals that belong to a new level; 0 without a change.

        Args:
            residual: The residual in standard errors.
            patience: Factor of the alarm threshold.
        """
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

    Deterministic: the same observations in the same order give the same bits, whatever methods are called in between.
    """

    def __init__(self) -> None:
        self._memory, self._prior_sigma = USUAL_MEMORY, PRIOR_SIGMA
        self._shelf: tuple[Fit, dict[float, _Size]] | None = None
        self._start(Shape())

    def _start(self, shape: Shape) -> None:
        self._shape = shape
        self._sizes: dict[float, _Size] = {}
        self._recent: deque[tuple[float, float]] = deque(maxlen=4 * WINDOW)
        self._count = 0
        self._cusum = Cusum()
        self._baseline: Fit | None = None
        self._latest: Fit | None = None

    def observe(self, n: float, seconds: float, patience: float = 1.0) -> float | None:
        """Learns that ``n`` samples took the rank ``seconds`` of compute time.

        Ignores an empty share and an impossible time (zero, not finite).

        Args:
            n: Number of samples, or a cost in samples of mean cost.
            seconds: Compute time of the rank, without waiting.
            patience: Factor of the threshold from which a change of speed is detected.

        Returns:
            The ratio of new to old time if a change of speed was just detected; else None.
        """
        if n <= 0 or not LEAST_SECONDS <= seconds <= MOST_SECONDS:
            return None
        before = self._baseline
        new_level = self._cusum.update(self._surprise(before, n, seconds), patience) if before else 0
        self._recent.append((n, seconds))
        if before and new_level and self._knew(n, new_level):
            return self._start_over(before, new_level)
        self._add(n, seconds)
        if new_level:  # a share of unknown size costs more or less than the line predicted
            self._cusum = Cusum()
            self._refit()
        elif self._count in FIRST_FITS or self._count % REFIT == 0:
            self._refit()
        return None

    def observe_cost(self, cost: float, seconds: float, patience: float = 1.0) -> float | None:
        """Learns that samples of this cost took the rank ``seconds`` of compute time. Returns what `observe` returns.

        Costs are hardly ever the same twice. So the time is moved to the nearest of a few sizes, along the line that is
        known so far; over so short a distance its error hardly matters.
        """
        if cost <= 0:
            return None
        size = SIZE_RATIO ** round(math.log(cost) / math.log(SIZE_RATIO))
        return self.observe(size, self.moved(seconds, cost, size), patience)

    def moved(self, seconds: float, cost: float, n: float) -> float:
        """Converts the seconds for ``cost`` to those for ``n``, along the line; in proportion if none is known yet."""
        if not (cost > 0 and n > 0):
            return seconds
        line = self._baseline.line if self._baseline else None
        return seconds * (line(n) / line(cost) if line else n / cost)

    def residual(self, n: float, seconds: float) -> float | None:
        """Returns log(seconds / predicted seconds). Returns None if the time is invalid or the line not settled."""
        if self._baseline is None or self._count < SETTLED or n <= 0:
            return None
        if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
            return None
        return math.log(seconds / self._baseline.line(n))

    @property
    def known(self) -> bool:
        """True if anything was observed."""
        return bool(self._sizes)

    @property
    def seems_faster(self) -> bool:
        """True if the last observations suggest a gain in speed that is not certain yet."""
        return self._cusum.below > HINT

    @property
    def sigma(self) -> float:
        """Robust relative standard deviation of a single observation."""
        return self.fit().sigma

    def predict(self, n: float) -> float:
        """Returns the predicted seconds for ``n`` samples. Raises ValueError before the first observation."""
        return self.fit().line(n)

    def error(self, n: float) -> float:
        """Returns the standard error of ``predict(n)`` in seconds. It grows away from the observed sizes."""
        return self.fit().error(n)

    def fit(self) -> Fit:
        """Returns the line as of the last observation. Raises ValueError before the first."""
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
        """Resets the model. Uses ``fit`` as the prior until new measurements arrive."""
        self._shelf = None
        self._start(Shape.from_fit(fit))
        self._prior_sigma = fit.sigma

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that was learned, as values that JSON can hold."""
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
        """Restores the state that ``state_dict`` returned, exactly."""
        self._start(Shape(*state["shape"]))
        self._sizes = _sizes_of(state["sizes"])
        self._recent.extend((n, seconds) for n, seconds in state["recent"])
        self._count = state["count"]
        vars(self._cusum).update(state["cusum"])
        self._baseline = Fit.from_values(state["baseline"]) if state["baseline"] else None
        self._memory, self._prior_sigma, shelf = state["memory"], state["prior_sigma"], state["shelf"]
        self._shelf = (Fit.from_values(shelf[0]), _sizes_of(shelf[1])) if shelf else None

    def _add(self, n: float, seconds: float) -> None:
        if n not in self._sizes and len(self._sizes) == SIZES:
            del self._sizes[min(self._sizes, key=lambda size: self._sizes[size].seen)]
        self._count += 1
        size = self._sizes.setdefault(n, _Size())
        size.seconds.append(seconds)
        size.seen = self._count
        self._latest = None

    def _refit(self) -> None:
        """Makes the present line the baseline, and estimates anew how correlated successive observations are."""
        fit = self.fit()
        residuals = [math.log(seconds / fit.line(n)) / fit.sigma for n, seconds in self._recent]
        self._memory, self._latest = memory(residuals), None
        self._baseline = self.fit()

    def _start_over(self, before: Fit, length: int) -> float | None:
        """Drops all but the latest observations. Returns the ratio of new to old time at the last size. Returns None if
        it is too small for a change of speed."""
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

    def _knew(self, n: float, length: int) -> bool:
        """Returns True if ``n`` is within the range of sizes observed before the last ``length`` observations."""
        earlier = [size for size, _ in self._recent][:-length]
        return len(earlier) >= KNOWN and min(earlier) / NEAR <= n <= max(earlier) * NEAR

    def _begin_with(self, kept: Sequence[tuple[float, float]], before: Fit) -> None:
        self._start(Shape.from_fit(before))
        self._prior_sigma = before.sigma
        self._recent.extend(kept)
        for n, seconds in kept:
            self._add(n, seconds)

    def _is_back(self, known: Fit) -> bool:
        """Returns True if the last observations agree with the line ``known`` from before."""
        apart = statistics.median(math.log(seconds / known.line(n)) for n, seconds in self._recent)
        return abs(apart) < max(SAME, 2.0 * known.sigma / math.sqrt(len(self._recent)))

    def _take_up(self, shelf: tuple[Fit, dict[float, _Size]]) -> None:
        self._sizes = shelf[1]
        self._count = max(size.seen for size in self._sizes.values())
        for n, seconds in self._recent:
            self._add(n, seconds)

    def _surprise(self, fit: Fit, n: float, seconds: float) -> float:
        """Returns the observation's distance from the line, in combined standard errors of the noise and the line."""
        expected = fit.line(n)
        noise = fit.sigma * math.sqrt(max(1.0, self._memory / USUAL_MEMORY))
        return math.log(seconds / expected) / math.hypot(noise, fit.error(n) / expected)

    def _robust_sigma(self) -> float:
        """Estimates sigma from differences of successive times at one size, which drift or a wrong level do not affect.

        The estimate is shrunk to a prior.
        """
        steps = [
            abs(second - first) / (first + second)
            for size in self._sizes.values()
            for first, second in pairwise(size.seconds)
        ]
        measured = STEP_TO_SIGMA * statistics.median(steps) if steps else 0.0
        prior = self._prior_sigma
        squares = len(steps) * measured * measured + PRIOR_SIGMA_COUNT * prior * prior
        return math.sqrt(squares / (len(steps) + PRIOR_SIGMA_COUNT))


def _size_values(sizes: dict[float, _Size]) -> list[Any]:
    return [[n, list(size.seconds), size.seen] for n, size in sizes.items()]


def _sizes_of(values: Sequence[Any]) -> dict[float, _Size]:
    return {n: _Size(deque(seconds, WINDOW), seen) for n, seconds, seen in values}
