"""The order of the rows of a loss that is given several rows for each sample.

As ``torch.cat([chosen, rejected])`` they are *stacked*: the first rows of all samples, then the second ones. As
``outputs.flatten(0, 1)`` those of a sample are together. Rows of all ranks one after another are in order only if
those of a sample are together. Nothing tells which order it is, but the loss: samples in another order change it only
if rows are taken for those of other samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Numbers = Callable[[Tensor], Sequence[float]]
"""Returns what a loss makes of the rows of all ranks in the order of an index."""

_FEWEST = 3
"""Number of samples from which two orders of rows can be told apart."""


def stacked(samples: Sequence[int], each: int) -> Tensor:
    """Returns the index that stacks the rows of all parts, each of which is stacked: (rows of each sample, samples).

    Args:
        samples: The numbers of samples of the parts.
        each: The number of rows of each sample.
    """
    parts, first = list[Tensor](), 0
    for count in samples:
        parts.append(torch.arange(first, first + each * count).view(each, count))
        first += each * count
    return torch.cat(parts, 1)


def are_stacked(numbers: Numbers, samples: Sequence[int], each: int, tolerance: float) -> bool | None:
    """Returns whether the loss is of stacked rows; None if that cannot be told, and makes a difference."""
    total = sum(samples)
    together = torch.arange(total * each).view(total, each).T
    orders = {False: together.T, True: stacked(samples, each)}
    found = {is_stacked: numbers(order.flatten()) for is_stacked, order in orders.items()}
    if are_near(found[False], found[True], tolerance):
        return False
    fits = []
    for is_stacked, order in orders.items():
        dim = int(is_stacked)
        others = (numbers(order.index_select(dim, turn).flatten()) for turn in _orders(total))
        if all(are_near(found[is_stacked], other, tolerance) for other in others):
            fits.append(is_stacked)
    return fits[0] if len(fits) == 1 else None


def can_tell(samples: Sequence[int]) -> bool:
    """Returns True if what is found for these samples goes for all batches."""
    return sum(samples) >= _FEWEST


def _orders(total: int) -> list[Tensor]:
    """Returns orders of samples: two of them exchanged, and random ones."""
    drawn = torch.Generator().manual_seed(0)
    found = [torch.randperm(total, generator=drawn) for _ in range(2)]
    for one, other in ((0, 1), (0, total - 1), (1, total - 1)):
        turn = torch.arange(total)
        turn[one], turn[other] = other, one
        found.append(turn)
    return found


def are_near(some: Sequence[float], others: Sequence[float], tolerance: float = 1e-6) -> bool:
    """Returns True if two calls of a loss gave the same numbers, to rounding."""
    if len(some) != len(others):
        return False
    return all(math.isclose(a, b, rel_tol=tolerance) or a == b for a, b in zip(some, others, strict=True))
