"""Whether a change of shares is worth it: what it would bring, and how sure that is.

Speeds are known with an error. The best shares for the speeds as they are known look better than they are,
and would follow every breath of noise; so a gain counts only from a least size on, and beyond its own
standard error.
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
"""Any rank of whose speed nothing is known."""


@dataclass(frozen=True)
class Policy:
    """When a change is worth it. The defaults suit steps from a few milliseconds up."""

    warmup_steps: int = 2
    """First steps, whose times are not learned from."""
    calibration_steps: int = 6
    calibration_spread: float = 0.25
    """By how much the calibration varies the shares, relative to them."""
    settle_steps: int = 8
    """Observations of new shares, or of a new speed, before the next look at what is to be gained."""
    every_steps: int = 16
    """Most steps between looks; the time between them doubles up to it while nothing changes."""
    least_gain: float = 0.02
    """Least predicted relative gain in step time that is tried."""
    sure_gain: float = 0.12
    """Gain from which a change is made at once, without a trial."""
    errors: float = 3.0
    """A change without a trial must also exceed the standard error of its gain this many times, ..."""
    trial_errors: float = 1.0
    """... and one that is tried so many times."""
    trial_steps: tuple[int, int] = (8, 48)
    """Least and most steps of a trial, in which old and new shares take turns."""
    model_error: float = 0.02
    """Relative error of a prediction that no number of observations makes smaller."""
    equal_steps: int = 100
    """Steps after a change until equal shares are tried again, if the others are not surely better; then doubling."""
    doubt_steps: int = 100
    """Steps in which half of the doubt is forgotten that a change leaves that did not pay."""
    most_doubt: float = 5.0
    return_steps: int = 40
    """Steps within which a change that is made back was rash."""
    probe_cost: float = 0.01
    """Relative cost in time that probes of idle ranks may have."""
    probe_every_steps: tuple[int, int] = (32, 2000)
    """Least and most steps between probes of an idle rank."""
    placeholder: int = 1
    """Samples that a rank computes where it has no share, so that it joins what the others wait for; 0 if it rests."""

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
        """Steps between probes that lengthen a step by the fraction ``excess``."""
        least, most = self.probe_every_steps
        return round(min(most, max(least, excess / self.probe_cost)))


@dataclass(frozen=True)
class Judgement:
    """What a change of shares would bring, predicted."""

    seconds_before: float
    seconds_after: float
    error: float
    """Relative standard error of the gain."""

    @property
    def gain(self) -> float:
        """Part of the step time that is saved."""
        return 1.0 - self.seconds_after / self.seconds_before

    @property
    def words(self) -> str:
        return f"steps are predicted {self.gain:.1%} shorter (standard error {self.error:.1%})"


def judge(
    models: Sequence[SpeedModel], lines: Sequence[Line], old: Sequence[int], new: Sequence[int]
) -> Judgement:
    """Compares two divisions of one batch by the times of their slowest ranks.

    Of the new times only those of ranks that gain work are in doubt: with less work a rank is never slower.
    """
    before = [line(n) for line, n in zip(lines, old, strict=True)]
    after = [line(n) for line, n in zip(lines, new, strict=True)]
    slowest = before.index(max(before))
    error_before = _error(models[slowest], lines[slowest], old[slowest])
    gaining = [rank for rank, n in enumerate(new) if n > old[rank]]
    error_after = max((_error(models[rank], lines[rank], new[rank]) for rank in gaining), default=0.0)
    return Judgement(max(before), max(after), math.hypot(error_before, error_after) / max(before))


def _error(model: SpeedModel, line: Line, n: int) -> float:
    if n <= 0:
        return 0.0
    return model.error(n) if model.known else Shape.USUAL_ERROR * line(n)


def learned_lines(models: Sequence[SpeedModel]) -> tuple[Line, ...]:
    """Each rank's line; a rank that was never observed is taken for an average one."""
    known = [model.fit().line for model in models if model.known]
    if not known:
        return (EVEN,) * len(models)
    average = Line(
        statistics.median(line.overhead_seconds for line in known),
        statistics.median(line.seconds_per_sample for line in known),
    )
    return tuple(model.fit().line if model.known else average for model in models)
