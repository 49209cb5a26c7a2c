"""Means stored as a sum and a number of terms.

With ``n_r`` terms on rank ``r``, the mean over the global batch is ``Σ total_r / Σ n_r``, which is the mean of the
ranks' means only if all ``n_r`` are equal. Storing the pair makes the mean exact for shares of any size.
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
    """A sum of terms and their number. The ``Sum`` objects of the parts of a batch add up to that of the batch.

    ``total`` and ``count`` are numbers or tensors of one element. If terms are weighted, ``count`` is the sum of the
    weights.
    """

    total: Number
    """The sum of the terms."""
    count: Number
    """The number of terms, or the sum of their weights."""

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> float:
        """``total / count``; nan if there are no terms, like a mean over an empty tensor in PyTorch."""
        total, count = (float(x.detach() if isinstance(x, Tensor) else x) for x in (self.total, self.count))
        return total / count if count else math.nan


class Loss(ABC):
    """A loss that is a sum of terms, divided at the end by a number known from the targets of the global batch.

    An object of any other class with the methods ``count`` and ``total`` is also accepted as a loss; ``divisor`` is
    optional there.
    """

    is_over_elements: bool = False
    """True if it is a mean over all elements of the targets, also those with which samples are padded."""

    @abstractmethod
    def count(self, targets: Any) -> Number:
        """Returns the number of terms (or the sum of their weights), known before the forward pass: a number or a 0-d
        tensor.
        """

    @abstractmethod
    def total(self, outputs: Any, targets: Any) -> Tensor:
        """Returns the sum of the terms, a 0-d tensor to back-propagate from."""

    def divisor(self, global_count: float) -> float:
        """Returns the divisor of the total over the global batch: its count by default; 1 makes the loss a plain
        sum.
        """
        return global_count


class SumLoss(Loss):
    """A loss made of two functions.

    >>> squared = SumLoss(
    ...     count=lambda targets: targets.numel(),
    ...     total=lambda outputs, targets: ((outputs - targets) ** 2).sum(),
    ... )

    Args:
        count: Maps the targets to the number of terms.
        total: Maps the outputs and the targets to the sum (not the mean) of the terms.
    """

    def __init__(self, *, count: Callable[[Any], Number], total: Callable[[Any, Any], Tensor]) -> None:
        self._count = count
        self._total = total

    def count(self, targets: Any) -> Number:
        return self._count(targets)

    def total(self, outputs: Any, targets: Any) -> Tensor:
        return self._total(outputs, targets)
