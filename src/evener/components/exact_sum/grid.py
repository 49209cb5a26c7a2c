"""The arithmetic of sums that are the same to the last bit in any order and grouping. Pure functions.

Why the sum of a tensor's gradients over blocks of samples has one result:

1. Each gradient is rounded to a multiple of ``u = 2 ** unit``, by itself: ``(g + M) - M`` in float64, where
   ``M = 1.5 * 2**52 * u``. For ``|g| <= 2**51 * u`` the sum ``g + M`` lies where float64 numbers are ``u`` apart.
2. Float64 represents every multiple of ``u`` up to ``2**53 * u``. So as long as the largest elements of all blocks add
   up to at most ``2**51 * u``, no partial sum is rounded, whichever rank, bucket or all-reduce makes it.
3. That they do is known from a *count*: each block counts its largest element in steps of ``2**21 * u``, rounded up.
   Counts are integers, and their sum is as exact.
4. If the count exceeds `MOST`, every rank sees the same count, and the sum is made once more of *limbs*: numbers are
   cut into digits of 26 bits, ``x = d0 + d1 + ...`` with ``dj`` a multiple of ``2**(26 * j) * u``. The sum of each
   digit is exact for the reason in 2, digits are carried to a unique form, and added up in a fixed order.
5. A block whose count is 1 may be far below its unit: in the first step, or after gradients that were much larger. What
   the unit cuts off is kept in digits below it. They are summed as well if the count of all blocks is at most
   `MOST_BELOW`, which every rank sees, too.
6. The next unit is a function of the unit and the count. So it is the same on all divisions of the work, too, and a
   count of about ``2**26`` leaves room for blocks that are 16 times larger, and 47 bits below their sum.

The subtraction of 1 can wait until the next block, which is rounded with ``-M``: ``(s + M) + (g - M)`` is the sum of
``s`` and the rounded ``g``. For as long as ``|s| <= 2**51 * u``, which 3 says, ``s + M`` lies where float64 numbers are
``u`` apart, too, and ``M`` is an even multiple of ``u``, so that halves are rounded to the same side with either sign.

Infinities and NaN pass through 1 and 2. Their count is infinite, and no limbs are made.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cache

import torch
from torch import Tensor

from evener.errors import ConfigurationError
from evener.torch_internals.foreach import add_each, subtract_each

FIRST_UNIT = -56
"""The exponent of the unit before the first step. Elements above ``2**-32`` keep all 24 bits of float32."""
MOST = 2.0**30
"""Largest count for which one float64 number for each element is exact: ``2**30 * 2**21 = 2**51`` units."""
_COUNTED = 21
_AIM = 26
_USUAL = 2.0 ** (_AIM - 1)
"""Counts from here to twice as much leave the unit as it is."""
MOST_BELOW = 2.0**17
"""Largest count of all blocks for which digits below the unit are summed. Above it, one block is large enough."""
GRID = f"grid of {_AIM + _COUNTED} bits"
"""A text for records: the places between the largest possible sum and the unit."""
_LARGEST_COUNT = 2.0**40
"""Larger counts are cut to this one. So a sum of counts is exact, or at least this large in any order."""
_LEAST_UNIT, _GREATEST_UNIT = -200, 900
_LIMB = 26
_BLOCKS = 17
"""Limbs have room for ``2**17`` blocks of the largest number of a type."""
_LEAST_LIMB = -160
"""Digits below the unit go down to this power of two, which is below the least float32."""


@cache
def magic(unit: int) -> float:
    """Returns the number whose addition rounds to multiples of ``2 ** unit``."""
    return math.ldexp(1.5, 52 + unit)


def round_each(values: list[Tensor], units: list[int]) -> None:
    """Rounds float64 tensors in place, each to its unit."""
    numbers = [magic(unit) for unit in units]
    add_each(values, numbers)
    subtract_each(values, numbers)


def check_rounding(device: torch.device) -> None:
    """Checks that the device rounds to the grid, and that nothing simplifies ``(x + M) - M`` to ``x``.

    Raises:
        ConfigurationError: If it does not.
    """
    unit, halves = -40, [0, 1, 3, 5, -1, -3, 2**41 + 1, -(2**41) - 3, 2**51 - 1]
    try:
        given = torch.tensor([math.ldexp(each, unit - 1) for each in halves], dtype=torch.float64).to(device)
        round_each([given], [unit])
        found = given.tolist()
    except (RuntimeError, TypeError) as error:  # such as no float64
        raise ConfigurationError(
            f"exact=bits needs float64 on {device}: {error}. Use a CPU or a CUDA device"
        ) from error
    if found != [math.ldexp(round(each / 2), unit) for each in halves]:
        raise ConfigurationError(
            f"exact=bits: {device} does not round (x + M) - M as IEEE 754 says, so that sums would depend on their "
            "order. Look for a build of PyTorch without fast-math, or leave exact=bits out"
        )


@cache
def scale_of_count(unit: int) -> float:
    """Returns the factor by which :func:`counted` multiplies the largest element of a block."""
    return math.ldexp(1.0, -(unit + _COUNTED))


def counted(largest: Sequence[float], scales: Sequence[float]) -> list[float]:
    """Returns the counts of tensors of a block.

    Args:
        largest: The largest absolute value of each tensor.
        scales: The :func:`scale_of_count` of each.
    """
    counts = [value * scale for value, scale in zip(largest, scales, strict=True)]
    return [
        float(math.ceil(min(count, _LARGEST_COUNT))) if count < math.inf else math.inf for count in counts
    ]


def next_unit(unit: int, count: float) -> int:
    """Returns the exponent of the unit of the next step, from that of this step and the count over all blocks."""
    if _USUAL < count <= 2 * _USUAL or not 0 < count < math.inf:
        return unit
    mantissa, exponent = math.frexp(min(count, _LARGEST_COUNT))
    least_power = exponent - (mantissa == 0.5)
    return min(max(unit + least_power - _AIM, _LEAST_UNIT), _GREATEST_UNIT)


# Limbs


def is_wide(count: float) -> bool:
    """Returns True if a sum with this count needs limbs."""
    return MOST < count < math.inf


def limbs_of(unit: int, count: float, dtype: torch.dtype) -> int:
    """Returns how many limbs a sum of numbers of ``dtype`` needs."""
    if count < _LARGEST_COUNT:
        return 2
    greatest = min(math.frexp(torch.finfo(dtype).max)[1], _GREATEST_UNIT)
    return max(2, 1 + math.ceil((_BLOCKS + greatest - 51 - unit) / _LIMB))


def split(value: Tensor, unit: int, limbs: int) -> Tensor:
    """Rounds a finite float64 tensor to its unit, and cuts it into digits: the first has the unit, each other one
    ``2**26`` times that of the digit before."""
    digits, rest = [], value
    for place in reversed(range(limbs)):
        number = magic(unit + _LIMB * place)
        digits.append((rest + number) - number)
        rest = rest - digits[-1]
    return torch.stack(digits[::-1])


def is_unusual(count: float) -> bool:
    """Returns True if a sum with this count has to be made once more, of digits."""
    return 0 < count <= MOST_BELOW or is_wide(count)


def are_usual(counts: Collection[float]) -> bool:
    """Returns True if none of these counts, at least one, is unusual. May return False even then."""
    return min(counts) > MOST_BELOW and max(counts) <= MOST


def split_below(value: Tensor, unit: int) -> Tensor:
    """Returns what rounding a float64 tensor to its unit cuts off, in digits as those of `split`: the first has the
    unit of `unit_below`."""
    return split(value, unit_below(unit), 1 + limbs_below(unit))[:-1]


def limbs_below(unit: int) -> int:
    """Returns the number of digits below a unit."""
    return max(1, math.ceil((unit - _LEAST_LIMB) / _LIMB))


def unit_below(unit: int) -> int:
    """Returns the exponent of the unit of the least digit below a unit."""
    return unit - _LIMB * limbs_below(unit)


def widened(limbs: Tensor, unit: int, number: int) -> Tensor:
    """Returns a sum of limbs with ``number`` limbs, of which it has fewer. A sum without limbs is one of one limb."""
    have = len(limbs)
    if have >= number:
        return limbs
    return torch.cat([limbs[:-1], split(limbs[-1], unit + _LIMB * (have - 1), number - have + 1)])


def folded(limbs: Tensor, unit: int) -> Tensor:
    """Returns the float64 number of each element. It does not depend on which sums of limbs stand for the number."""
    digits: list[Tensor] = list(limbs)
    for place in range(len(digits) - 1):
        step = math.ldexp(1.0, unit + _LIMB * (place + 1))
        carry = (digits[place] / step).floor() * step
        digits[place], digits[place + 1] = digits[place] - carry, digits[place + 1] + carry
    total = digits.pop()
    for digit in reversed(digits):
        total = total + digit
    return total
