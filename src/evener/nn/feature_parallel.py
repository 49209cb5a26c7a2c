"""A linear layer whose input features are divided over ranks.

Rank ``r`` holds the columns ``c_r`` of the weight and reads only these features of each sample. Shoeybi et al.,
"Megatron-LM", 2019, call this row-parallel, after the rows of the transposed weight::

    x W^T  =  x[:, c_0] W[:, c_0]^T  +  x[:, c_1] W[:, c_1]^T  +  ...          summed over the ranks, once a pass

The layers that follow see the full sum, the same on every rank. So backward sends nothing: the gradient of the sum is
the gradient of each term, and each rank updates its own slice of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.errors import ConfigurationError
from evener.hardware.timers import waiting
from evener.nn.unowned import Shared

SumOverRanks = Callable[[Tensor], None]
"""Replaces a tensor by its sum over the ranks, in place; the result is bitwise the same on all ranks."""


class FeatureParallelLinear(nn.Linear):
    """``nn.Linear`` that can hold a slice of its weight, for a slice of the input features.

    It is constructed as ``nn.Linear`` and computes the same until :func:`divide_features` divides it. A model uses it
    to mark the layers that read the wide features. If divided, all ranks must call it together. Input: (..., columns
    of this rank). Output: (..., out_features), the same on every rank.
    """

    columns: range | None = None
    """The input features of this rank; None if the layer is not divided."""
    _ranks = Shared[SumOverRanks]()

    def forward(self, input: Tensor) -> Tensor:
        if self.columns is None:
            return super().forward(input)
        ranks = self._ranks.value_for(self)
        if input.shape[-1] != len(self.columns):
            raise ConfigurationError(
                f"{self} got {input.shape[-1]} features: the layer that reads the features must be the first, and "
                "nothing before it may change their number"
            )
        output: Tensor = _Sum.apply(F.linear(input, self.weight), ranks)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias

    def extra_repr(self) -> str:
        held = "" if self.columns is None else f", columns={self.columns.start}:{self.columns.stop}"
        return super().extra_repr() + held


def divide_features(linear: nn.Linear, columns: range, total: SumOverRanks) -> FeatureParallelLinear:
    """Divides ``linear`` in place: keeps the given columns of its weight. Names and hooks of the module stay.

    Args:
        linear: An ``nn.Linear`` or an undivided :class:`FeatureParallelLinear`, the same on all ranks.
        columns: Consecutive input features of this rank. Together the ranks must have all features, each once.
        total: Sums the partial outputs over the ranks, in place.

    Raises:
        ConfigurationError: If the layer is divided already, or is of another class, which may compute something else.
    """
    if type(linear) not in (nn.Linear, FeatureParallelLinear) or getattr(linear, "columns", None) is not None:
        raise ConfigurationError(
            f"{linear} cannot be divided by features: it must be a torch.nn.Linear, undivided"
        )
    linear.__class__ = FeatureParallelLinear
    assert isinstance(linear, FeatureParallelLinear)
    part = linear.weight.detach()[:, columns.start : columns.stop].clone()
    made = nn.Parameter(part, requires_grad=linear.weight.requires_grad)
    vars(made).update(vars(linear.weight) | vars(made))  # the user's attributes
    linear.weight = made
    linear.columns, linear._ranks = columns, Shared(total)
    return linear


class _Sum(torch.autograd.Function):
    """Sums the partial outputs over the ranks, in place; backward passes the gradient on unchanged."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, total: SumOverRanks) -> Tensor:
        ctx.mark_dirty(partial)
        with waiting():
            total(partial)
        return partial

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
