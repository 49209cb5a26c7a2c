"""The error of a mean over steps.

Steps are correlated in time: a slow spell of the machine makes many steps slow. So the interval of a mean is that of
*batch means*: the steps are cut into batches of equal length, whose means are correlated less. The correlation that is
left, as that of an AR(1) series, reduces their number to an effective one. The standard error and the degrees of
freedom of Student's t follow from it (N. M. Steiger and others, "ASAP3: a batch means procedure for steady-state
simulation analysis", ACM TOMACS 15(1), 2005, which fits AR(1) to batch means, too).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from evener.tools.report.columns import Numbers

_BATCHES = 32
_MOST_CORRELATED = 0.9
_LEAST_FREEDOM = 3.0
_INSIDE = 0.975
"""The interval holds 95 %."""


@dataclass(frozen=True)
class MeanOfSteps:
    """A mean of correlated numbers, and what is known of its error."""

    mean: float
    variance: float
    """Square of the standard error."""
    freedom: float
    """Degrees of freedom of Student's t."""


def mean_of(values: Numbers) -> MeanOfSteps:
    """Returns the mean of numbers in their order in time.

    The correlation that is measured in a short series is too small on average, by about ``(1 + 3 r) / n`` (M. G.
    Kendall, "Note on bias in the estimation of autocorrelation", Biometrika 41, 1954). With the whole correction,
    intervals of strongly correlated steps are too wide, since an error of ``r`` counts more where it is above; half of
    it is added.
    """
    length = max(1, len(values) // _BATCHES)
    number = len(values) // length
    batches = values[len(values) - number * length :].reshape(number, length).mean(axis=1)
    apart = batches - batches.mean()
    squares = float(apart @ apart)
    correlation = float(apart[1:] @ apart[:-1]) / squares if squares else 0.0
    correlation += (1 + 3 * correlation) / (2 * number)
    correlation = min(max(correlation, 0.0), _MOST_CORRELATED)
    effective = number * (1 - correlation) / (1 + correlation)
    variance = squares / number / (1 - 1 / max(2.0, effective)) / effective
    return MeanOfSteps(float(values.mean()), variance, max(_LEAST_FREEDOM, effective - 1))


def reach_of(*errors: tuple[float, float]) -> float:
    """Returns how far the interval of a sum reaches to both sides, by Welch's t.

    Args:
        errors: Variance and degrees of freedom of each term.
    """
    variance = sum(each for each, _ in errors)
    if not variance:
        return 0.0
    freedom = 1 / sum((each / variance) ** 2 / own for each, own in errors)
    return student_t(freedom) * math.sqrt(variance)


def student_t(freedom: float) -> float:
    """Returns the quantile of Student's t for the interval, within 0.2 % from 3 degrees of freedom on (M. Abramowitz
    and I. A. Stegun, Handbook of Mathematical Functions, 26.7.5)."""
    z = NormalDist().inv_cdf(_INSIDE)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
