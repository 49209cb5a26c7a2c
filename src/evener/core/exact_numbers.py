"""Sums of numbers that do not depend on the order of the terms: for losses, counts and metrics of runs exact in bits.

``math.fsum`` rounds the exact sum of its terms once. A rank tells its exact sum as two numbers, the rounded sum and the
rounded rest. Both together are exact if the bits of all terms lie within 105 binary places, as those of float32 terms
do whose sizes differ by a factor below 2**80. Then the sum over all ranks is the rounded exact sum of all terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

Added = Callable[[Iterable[float]], tuple[float, ...]]
"""Adds up numbers, and returns the sum and, if it is to be exact, the rest."""


def exact_total(numbers: Iterable[float]) -> float:
    """Returns the sum of ``numbers``, rounded once. With infinities or NaN, returns their sum."""
    terms = list(numbers)
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):  # a sum that overflows, or infinities of both signs
        return sum(terms)


def plain_total(numbers: Iterable[float]) -> tuple[float, ...]:
    """Returns the sum of ``numbers``, rounded with each addition."""
    return (sum(numbers),)


def total_and_rest(numbers: Iterable[float]) -> tuple[float, ...]:
    """Returns the sum of ``numbers`` rounded to one number, and what that leaves of the exact sum."""
    terms = list(numbers)
    total = exact_total(terms)
    return total, exact_total([*terms, -total]) if math.isfinite(total) else 0.0
