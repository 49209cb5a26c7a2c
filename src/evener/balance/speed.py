"""One rank's speed, learned from the times of its own work while it trains.

The line that ``fit_line`` draws must stay right under four difficulties, each with its answer here or there:

===========================  =====================================================================
single slow steps            medians at each size, Theil-Sen slope (weighted median) between sizes
few sizes, close together    the slope is shrunk to a prior by its standard error, which is told
a device that changes speed  CUSUM over winsorized residuals sees a jump after four observations;
                             older ones are dropped, the ratio of ``a`` to ``b`` stays as the prior
cliffs, sizes that cost      the running maximum: a larger share never costs less than what a
more than the line says      smaller one was measured at
===========================  =====================================================================

CUSUM: Page, Biometrika 41 (1954).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import astuple, dataclass, field
from itertools import pairwise
from typing import Any

from evener.balance.line import Fit, Line, Point, Shape, fit_line

WINDOW = 48
"""Observations kept at each size."""
SIZES = 12
"""Sizes kept; the one not seen for longest goes first."""
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e9
REFIT = 16
"""Observations after which the line that new ones are compared with is fitted again ..."""
FIRST_FITS = (1, 2, 3, 4, 6, 8, 11)
"""... and after which it is at first, while each adds much."""

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

    def update(self, residual: float) -> int:
        """Number of latest residuals that belong to a new level: 0 while there is none."""
        clipped = max(-self.CLIP, min(self.CLIP, residual))
        self.above = max(0.0, self.above + clipped - self.SLACK)
        self.below = max(0.0, self.below - clipped - self.SLACK)
        self.length_above = self.length_above + 1 if self.above else 0
        self.length_below = self.length_below + 1 if self.below else 0
        if max(self.above, self.below) <= self.ALARM:
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
        self._start(Shape())

    def _start(self, shape: Shape) -> None:
        self._shape = shape
        self._sizes: dict[int, _Size] = {}
        self._recent: deque[tuple[int, float]] = deque(maxlen=4 * WINDOW)
        self._count = 0
        self._cusum = Cusum()
        self._baseline: Fit | None = None
        self._latest: Fit | None = None

    def observe(self, n: int, seconds: float) -> float | None:
        """Learns that ``n`` samples took ``seconds`` of the rank's own work.

        An empty share and a time that no clock can have measured (zero, not finite) are ignored.

        Returns:
            New time over old, when the rank has just been found to have changed its speed; else None.
        """
        if n <= 0 or not LEAST_SECONDS <= seconds <= MOST_SECONDS:
            return None
        before = self._baseline
        new_level = self._cusum.update(_surprise(before, n, seconds)) if before else 0
        self._recent.append((n, seconds))
        if before and new_level:
            return self._start_over(before, new_level)
        self._add(n, seconds)
        if self._count in FIRST_FITS or self._count % REFIT == 0:
            self._baseline = self.fit()
        return None

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
            self._latest = fit_line(points, self._robust_sigma(), self._shape)
        return self._latest

    def state_dict(self) -> dict[str, Any]:
        """All that was learned, as plain values that JSON can hold."""
        return {
            "sizes": [[n, list(size.seconds), size.seen] for n, size in self._sizes.items()],
            "recent": [list(pair) for pair in self._recent],
            "count": self._count,
            "shape": list(astuple(self._shape)),
            "cusum": dict(vars(self._cusum)),
            "baseline": self._baseline and list(astuple(self._baseline)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues exactly where ``state_dict`` was taken."""
        self._start(Shape(*state["shape"]))
        self._sizes = {n: _Size(deque(values, WINDOW), seen) for n, values, seen in state["sizes"]}
        self._recent.extend((n, seconds) for n, seconds in state["recent"])
        self._count = state["count"]
        vars(self._cusum).update(state["cusum"])
        if state["baseline"]:
            line, *errors = state["baseline"]
            self._baseline = Fit(Line.from_values(line), *errors)

    def _add(self, n: int, seconds: float) -> None:
        if n not in self._sizes and len(self._sizes) == SIZES:
            del self._sizes[min(self._sizes, key=lambda size: self._sizes[size].seen)]
        self._count += 1
        size = self._sizes.setdefault(n, _Size())
        size.seconds.append(seconds)
        size.seen = self._count
        self._latest = None

    def _start_over(self, before: Fit, length: int) -> float:
        """Drops all but the last ``length`` observations; returns new over old time at the last size."""
        kept = list(self._recent)[-length:]
        self._start(Shape.of(before))
        self._recent.extend(kept)
        for n, seconds in kept:
            self._add(n, seconds)
        self._baseline = self.fit()
        last = kept[-1][0]
        return self._baseline.line(last) / before.line(last)

    def _robust_sigma(self) -> float:
        """From differences of successive times at one size, which a drift or a wrong level does not widen."""
        steps = [
            abs(second - first) / (first + second)
            for size in self._sizes.values()
            for first, second in pairwise(size.seconds)
        ]
        measured = STEP_TO_SIGMA * statistics.median(steps) if steps else 0.0
        squares = len(steps) * measured * measured + PRIOR_SIGMA_COUNT * PRIOR_SIGMA * PRIOR_SIGMA
        return math.sqrt(squares / (len(steps) + PRIOR_SIGMA_COUNT))


def _surprise(fit: Fit, n: int, seconds: float) -> float:
    """The observation's distance from the line in standard errors, of the noise and of the line together."""
    expected = fit.line(n)
    return math.log(seconds / expected) / math.hypot(fit.sigma, fit.error(n) / expected)
