"""User-defined losses: the sum of the terms, their number, and a factor.

::

    loss(total=f)                         Σ f / number of samples       f sums over the samples it gets
    loss(total=f, count=number_of_tokens) Σ f / Σ number_of_tokens      a mean over other terms
    loss(total=f, count="sum")            Σ f                           a plain sum
    loss(nn.MSELoss(), scale=0.5)         0.5 * the mean                a known loss, scaled
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Literal

from torch import Tensor

from evener.core.losses.sums import Loss, Number
from evener.core.losses.torch_losses import exact, is_sum, is_torch_loss
from evener.errors import LossError

Count = Callable[[Any], Number] | Literal["sum"] | None


def loss(total: Any, count: Count = None, scale: float = 1.0) -> Loss:
    """Creates a loss that is a sum over terms.

    Args:
        total: A function of ``(outputs, targets)`` that returns the **sum** of the terms, one number; or a loss that
            Evener knows, such as ``nn.MSELoss()``, to be scaled or given another count.
        count: A function of the targets that returns the number of terms. The sum over the global batch is divided by
            the number of terms in it. Default: the number of samples (rows of the first tensor among the targets).
            ``"sum"`` does not divide: the gradient then grows with the batch. A known loss has its own count; one with
            ``reduction="sum"`` may be given another.
        scale: A constant factor, such as the square of a temperature.

    >>> half_squared_error = loss(lambda outputs, targets: (outputs - targets).square().sum(), scale=0.5)

    Raises:
        LossError: If an argument has the wrong type, or a loss that is a mean is given a count.
    """
    _check(total, count, scale)
    if not (is_sum(total) or is_torch_loss(total)):
        number_of = count if callable(count) else _rows
        return _Own(total, number_of, _by_one if count == "sum" else _by_count, float(scale))
    known = exact(total)
    if count is None:
        return _Own(known.total, known.count, known.divisor, float(scale))
    if known.divisor(2.0) != 1.0:
        raise LossError(
            f"the loss {total!r} is a mean and knows its own count: leave out count=, or give its sum, as with "
            'reduction="sum"'
        )
    if count == "sum":
        return _Own(known.total, known.count, _by_one, float(scale))
    return _Own(known.total, count, _by_count, float(scale))


@dataclasses.dataclass(frozen=True)
class _Own(Loss):
    """A loss made of three functions and a factor."""

    sum_of: Callable[[Any, Any], Tensor]
    number_of: Callable[[Any], Number]
    divide_by: Callable[[float], float]
    """Maps the global count to the divisor of the sum over the global batch."""
    scale: float

    def count(self, targets: Any) -> Number:
        return self.number_of(targets)

    def total(self, outputs: Any, targets: Any) -> Tensor:
        return self.sum_of(outputs, targets) * self.scale

    def divisor(self, global_count: float) -> float:
        return self.divide_by(global_count)


def _by_count(global_count: float) -> float:
    return global_count


def _by_one(global_count: float) -> float:
    return 1.0


def _check(total: Any, count: Any, scale: Any) -> None:
    if isinstance(total, type) or not (callable(total) or is_sum(total)):
        raise LossError(
            f"evener.loss: total is {total!r}; give a function (outputs, targets) that returns the sum of the terms"
        )
    if not (count is None or count == "sum" or callable(count)):
        raise LossError(
            f"evener.loss: count is {count!r}; give a function of the targets that returns the number of terms, "
            '"sum" for a plain sum, or nothing for the number of samples'
        )
    if isinstance(scale, bool) or not isinstance(scale, Real) or not math.isfinite(scale):
        raise LossError(f"evener.loss: scale is {scale!r}; give a finite number")


def _rows(targets: Any) -> int:
    """Returns the number of samples: rows of the first tensor among the targets."""
    tensor = _first_tensor(targets)
    if tensor is None or not tensor.dim():
        raise LossError(
            "evener.loss: there is no tensor with a row for each sample among the targets "
            f"({type(targets).__name__}), so the number of terms is not known; give count="
        )
    return len(tensor)


def _first_tensor(tree: Any) -> Tensor | None:
    if isinstance(tree, Tensor):
        return tree
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    leaves = (_first_tensor(part) for part in tree) if isinstance(tree, tuple | list) else ()
    return next((leaf for leaf in leaves if leaf is not None), None)
