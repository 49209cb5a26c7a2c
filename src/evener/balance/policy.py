"""Predicts what a change of shares would bring and how certain that is, and holds the thresholds for a change.

Speeds are known with an error. The best shares for the estimated speeds look better than they are, and would follow
noise. So a predicted gain counts only if it has a minimum size and exceeds its own standard error.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from evener.balance.speed import SpeedModel
from evener.balance.time_model import Line, Shape
from evener.errors import ConfigurationError

EVEN = Line(0.0, 1.0)
"""Line of a rank whose speed is unknown."""


@dataclass(frozen=True)
class Policy:
    """Thresholds and intervals for changes of shares. The defaults suit steps from a few milliseconds up."""

    warmup_steps: int = 2
    """Number of first steps whose times are ignored."""
    calibration_steps: int = 6
    calibration_spread: float = 0.25
    """Relative amount by which the calibration varies the shares."""
    settle_steps: int = 8
    """Observations of new shares, or of a new speed, before a change is considered again."""
    every_steps: int = 16
    """Most steps between two looks at a possible change. While nothing changes, the interval doubles up to this."""
    least_gain: float = 0.02
    """Least predicted relative gain in step time that is worth a trial."""
    sure_gain: float = 0.12
    """Least predicted gain for a change at once, without a trial."""
    errors: float = 3.0
    """A change without a trial must also gain more than this many standard errors of the prediction."""
    trial_errors: float = 1.0
    """A trial requires a gain of more than this many standard errors of the prediction."""
    trial_steps: tuple[int, int] = (8, 48)
    """Least and most steps of a trial, in which old and new shares take turns."""
    model_error: float = 0.02
    """Relative error of a prediction that remains however many observations there are."""
    equal_steps: int = 100
    """Steps after a change until equal shares are tried again, unless the others are clearly better; then doubles."""
    doubt_steps: int = 100
    """Half-life in steps of the raised thresholds of `Backoff`."""
    most_doubt: float = 5.0
    """Largest factor by which failed trials raise the threshold for a trial."""
    return_steps: int = 40
    """A change at once that is reverted within this many steps raises the threshold for such changes."""
    probe_cost: float = 0.01
    """Fraction of the training time that probes of idle ranks may cost."""
    probe_every_steps: tuple[int, int] = (32, 2000)
    """Least and most steps between probes of an idle rank."""
    placeholder: int = 1
    """Samples that a rank without a share computes, so that it joins the collectives of the others; 0 for none."""

    def __post_init__(self) -> None:
        least, most = self.probe_every_steps
        if (
            min(self.warmup_steps, self.calibration_steps) < 0
            or not 1 <= self.settle_steps <= self.every_steps
        ):
            raise ConfigurationError(
                f"{self}: need 0 <= warmup_steps, 0 <= calibration_steps, 1 <= settle_steps <= every_steps"
            )
        if not (0 <= self.calibration_spread < 1 and self.probe_cost > 0 and 1 <= least <= most):
            raise ConfigurationError(
                f"{self}: need 0 <= spread < 1, probe_cost > 0, 1 <= least <= most steps"
            )

    def probe_interval(self, excess: float) -> int:
        """Returns the number of steps between probes, each of which lengthens its step by the fraction ``excess``."""
        least, most = self.probe_every_steps
        return round(min(most, max(least, excess / self.probe_cost)))


@dataclass(frozen=True)
class PredictedChange:
    """Predicted effect of a change of shares."""

    seconds_before: float
    seconds_after: float
    error: float
    """Relative standard error of the gain."""

    @property
    def gain(self) -> float:
        """Fraction of the step time that is saved."""
        return 1.0 - self.seconds_after / self.seconds_before

    @property
    def description(self) -> str:
        return f"steps are predicted {self.gain:.1%} shorter (standard error {self.error:.1%})"


def judge(
    models: Sequence[SpeedModel], lines: Sequence[Line], old: Sequence[int], new: Sequence[int]
) -> PredictedChange:
    """Predicts the effect of a change from shares ``old`` to ``new``, by the times of the slowest ranks.

    Only ranks that get more work add to the error of the new time: with less work a rank is never slower.
    """
    before = [line(n) for line, n in zip(lines, old, strict=True)]
    after = [line(n) for line, n in zip(lines, new, strict=True)]
    slowest = before.index(max(before))
    error_before = _error(models[slowest], lines[slowest], old[slowest])
    gaining = [rank for rank, n in enumerate(new) if n > old[rank]]
    error_after = max((_error(models[rank], lines[rank], new[rank]) for rank in gaining), default=0.0)
    return PredictedChange(max(before), max(after), math.hypot(error_before, error_after) / max(before))


def _error(model: SpeedModel, line: Line, n: int) -> float:
    if n <= 0:
        return 0.0
    return model.error(n) if model.known else Shape.USUAL_ERROR * line(n)


def learned_lines(models: Sequence[SpeedModel]) -> tuple[Line, ...]:
    """Returns each rank's line. A rank that was never observed gets the median overhead and time per sample."""
    known = [model.fit().line for model in models if model.known]
    if not known:
        return (EVEN,) * len(models)
    average = Line(
        statistics.median(line.overhead_seconds for line in known),
        statistics.median(line.seconds_per_sample for line in known),
    )
    return tuple(model.fit().line if model.known else average for model in models)
