"""What the noise of real devices is like: it is alike from step to step, and on all ranks of a busy host.

Two things follow. What all ranks have in common is taken out of their times before anything is learned from them,
as it says nothing about how to divide a batch. And what is a rank's own counts by its effective number of
observations, which is smaller than their number: the variance of a mean over ``BLOCK`` successive ones, over what it
would be if they were independent, is the number of observations that are worth one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

USUAL_MEMORY = 2.0
"""Observations worth one, where too few were made to tell: a correlation of a third from step to step."""
USUAL_COUNT = 32
"""Observations that this prior is worth."""
MOST_MEMORY = 12.0
BLOCK = 8
CLIP = 3.0
"""Standard deviations at which an outlier is cut off."""
LEVEL_STEPS = 8
"""Steps over which the common level is averaged."""


def memory(residuals: Sequence[float]) -> float:
    """How many of the observations are worth one independent one; ``residuals`` in standard deviations, in order."""
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
    """What the ranks' ``residuals`` (logarithms of time over what is expected) have in common in a step.

    Their median; of an even number of ranks with the ``level`` of the steps before as one more. So of two ranks the
    one whose time stayed as it was is the measure of the other, and if both changed, the one that changed less.
    """
    votes = list(residuals) if len(residuals) % 2 else [*residuals, level]
    return statistics.median(votes)
