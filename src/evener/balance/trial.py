"""Measures from step times what a change of shares brings.

A step takes as long as its slowest rank, whatever a model predicts. So a small predicted gain is tried first: old and
new shares take turns, and prediction and measurement are combined, each weighted by its error. A change with a large
predicted gain is made at once, and the steps after it are compared with those before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from evener.balance.policy import Policy

MEDIAN_ERROR = 1.2533
"""Ratio of the standard error of a median of normal values to that of their mean."""
USUAL_SIGMA, USUAL_COUNT = 0.05, 4
"""Prior of the relative noise of step times, and how many steps this prior is worth."""


@dataclass
class DivisionComparison:
    """Compares the step times of two divisions of one batch, of which the new one is predicted to be faster."""

    effective: int
    """First step of the comparison."""
    batch_size: int
    old: tuple[int, ...]
    new: tuple[int, ...]
    gain: float
    """Predicted fraction of the step time that is saved."""
    error: float
    """Standard error of ``gain``."""
    cause: str = ""
    """Why the new division was considered, for the decision's reason."""
    promised: float | None = None
    """If the new division would revert a change: the gain that was predicted for that change. Else None."""
    of_old: list[float] = field(default_factory=list)
    """Logarithms of the step times with the old division."""
    of_new: list[float] = field(default_factory=list)
    """Logarithms of the step times with the new division."""

    def add(self, sizes: Sequence[int], seconds: float) -> None:
        """Adds a step with the shares ``sizes``, whose slowest rank took ``seconds``. Ignores other shares."""
        if seconds > 0 and math.isfinite(seconds):
            if tuple(sizes) == self.old:
                self.of_old.append(math.log(seconds))
            elif tuple(sizes) == self.new:
                self.of_new.append(math.log(seconds))

    @property
    def fewest(self) -> int:
        """Number of steps of the division that had fewer."""
        return min(len(self.of_old), len(self.of_new))

    def measured(self) -> tuple[float, float]:
        """Returns the measured gain (a difference of logarithms) and its standard error. Each division needs a step."""
        middles = [statistics.median(times) for times in (self.of_old, self.of_new)]
        apart = [abs(time - middles[0]) for time in self.of_old] + [
            abs(time - middles[1]) for time in self.of_new
        ]
        squares = len(apart) * (1.4826 * statistics.median(apart)) ** 2 + USUAL_COUNT * USUAL_SIGMA**2
        sigma = math.sqrt(squares / (len(apart) + USUAL_COUNT))
        each = math.sqrt(1 / len(self.of_old) + 1 / len(self.of_new))
        return middles[0] - middles[1], MEDIAN_ERROR * sigma * each

    def together(self, model_error: float) -> tuple[float, float]:
        """Returns the mean of predicted and measured gain, weighted by precision, and its standard error."""
        predicted, trusted = -math.log(max(1e-9, 1.0 - self.gain)), math.hypot(self.error, model_error)
        measured, error = self.measured()
        weights = 1 / trusted**2, 1 / error**2
        mean = (predicted * weights[0] + measured * weights[1]) / sum(weights)
        return mean, math.sqrt(1 / sum(weights))

    def verdict(self, policy: Policy) -> bool | None:
        """Returns True if the new division stays, False if not. Returns None while there are too few steps."""
        if self.fewest < policy.trial_steps[0] // 2:
            return None
        gain, error = self.together(policy.model_error)
        measured, doubt = self.measured()
        if gain > 2.0 * error and measured > doubt:
            return True
        if gain < 0.0:
            return False
        if self.fewest < policy.trial_steps[1] // 2:
            return None
        return gain > error and measured > 0

    @property
    def description(self) -> str:
        """Text that compares measurement and prediction."""
        measured, _ = self.measured()
        if self.promised is not None:
            return f"steps were {_change(1.0 - math.exp(measured))}, not {_change(self.promised)}"
        return (
            f"in a trial, steps were {_change(1.0 - math.exp(-measured))} "
            f"({self.fewest} of each, predicted {_change(self.gain)})"
        )

    def values(self) -> list[Any]:
        return [list(value) if isinstance(value, tuple | list) else value for value in vars(self).values()]

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> DivisionComparison:
        effective, batch_size, old, new, *rest = values
        return cls(effective, batch_size, tuple(old), tuple(new), *rest)


def _change(gain: float) -> str:
    return f"{abs(gain):.1%} {'shorter' if gain >= 0 else 'longer'}"
