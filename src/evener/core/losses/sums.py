"""A mean kept apart as its sum and the number of its terms.

With ``n_r`` terms on rank ``r``, the mean over the global batch is ``Σ total_r / Σ n_r``, which is the mean
of the ranks' means only if all ``n_r`` are equal. Keeping the pair is what makes shares of any size exact.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

Number: TypeAlias = "Tensor | float"


@dataclass(frozen=True)
class Sum:
    """The sum of some terms and their number; sums of the parts of a batch add up to the sum of the batch.

    ``total`` and ``count`` are numbers or tensors of one element. Where terms are weighted, ``count`` is the
    sum of the weights.
    """

    total: Number
    """The sum of the terms."""
    count: Number
    """How many terms, or the sum of their weights."""

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> float:
        """``total / count``; nan when there was no term, as a mean over nothing is in PyTorch."""
        total, count = (float(x.detach() if isinstance(x, Tensor) else x) for x in (self.total, self.count))
        return total / count if count else math.nan


class Loss(ABC):
    """A loss that is a sum of terms, divided at the end by a number known from the targets of the global
    batch.

    An object of any other class with these two methods does as well; ``divisor`` is optional there.
    """

    @abstractmethod
    def count(self, targets: Any) -> Number:
        """The number of terms (or the sum of their weights), known before the forward pass: a number or a 0-d
        tensor.
        """

    @abstractmethod
    def total(self, outputs: Any, targets: Any) -> Tensor:
        """The sum of the terms, a 0-d tensor to back-propagate from."""

    def divisor(self, global_count: float) -> float:
        """What the total over the global batch is divided by: its count, unless the loss is meant to be a
        plain sum.
        """
        return global_count


class SumLoss(Loss):
    """A loss put together from two functions.

    >>> squared = SumLoss(
    ...     count=lambda targets: targets.numel(),
    ...     total=lambda outputs, targets: ((outputs - targets) ** 2).sum(),
    ... )

    Args:
        count: From the targets, the number of terms.
        total: From the outputs and the targets, the sum (not the mean) of the terms.
    """

    def __init__(self, *, count: Callable[[Any], Number], total: Callable[[Any, Any], Tensor]) -> None:
        self._count = count
        self._total = total

    def count(self, targets: Any) -> Number:
        return self._count(targets)

    def total(self, outputs: Any, targets: Any) -> Tensor:
        return self._total(outputs, targets)
