"""Model of the noise in step times: it is correlated from step to step, and between the ranks of a busy host.

Two things follow. First, the slowdown that all ranks share is removed from their times before anything is learned from
them, because it says nothing about how to divide a batch. Second, a rank's observations count by their effective
number, which is smaller than their number. The number of observations that are worth one independent observation is the
variance of a mean over ``BLOCK`` successive ones, divided by what it would be if they were independent.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

USUAL_MEMORY = 2.0
"""Prior of `memory`. It corresponds to a correlation of one third from step to step."""
USUAL_COUNT = 32
"""Number of observations that this prior is worth."""
MOST_MEMORY = 12.0
BLOCK = 8
CLIP = 3.0
"""Standard deviations at which outliers are clipped."""
LEVEL_STEPS = 8
"""Steps over which the common level is averaged."""


def memory(residuals: Sequence[float]) -> float:
    """Estimates how many observations are worth one independent one.

    Args:
        residuals: The residuals in standard deviations, in order.
    """
    if len(residuals) < 3 * BLOCK:
        return USUAL_MEMORY
    clipped = [max(-CLIP, min(CLIP, residual)) for residual in residuals]
    variance = _variance(clipped)
    means = [sum(clipped[i : i + BLOCK]) / BLOCK for i in range(0, len(clipped) - BLOCK + 1, BLOCK // 2)]
    measured = BLOCK * _variance(means) / variance if variance else 1.0
    weighted = len(clipped) * measured + USUAL_COUNT * USUAL_MEMORY
    return max(1.0, min(weighted / (len(clipped) + USUAL_COUNT), MOST_MEMORY))


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)


def common(residuals: Sequence[float], level: float) -> float:
    """Returns the slowdown that all ranks share in a step: the median of the ranks' residuals.

    For an even number of ranks, ``level`` is one more vote. So with two ranks, the one whose time did not change is the
    reference for the other, and if both changed, the one that changed less.

    Args:
        residuals: log(time / expected time) of each rank.
        level: The shared slowdown of the steps before.
    """
    votes = list(residuals) if len(residuals) % 2 else [*residuals, level]
    return statistics.median(votes)
