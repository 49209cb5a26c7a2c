"""A linear layer whose input features are divided over ranks, as a matrix product falls into a sum of products.

Rank ``r`` holds the columns ``c_r`` of the weight and reads no other features of any sample (row-parallel, in the
words of Shoeybi et al., "Megatron-LM", 2019, after the rows of the transposed weight)::

    x W^T  =  x[:, c_0] W[:, c_0]^T  +  x[:, c_1] W[:, c_1]^T  +  ...          summed over the ranks, once a pass

All that follows sees the full sum, on every rank the same. So backward needs no message: the gradient of the sum is
that of each term, and a rank's slice of the weight belongs to it alone.
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
"""Replaces a tensor by its sum over the ranks, in place; afterwards all hold the same bits."""


class FeatureParallelLinear(nn.Linear):
    """``nn.Linear`` that may hold a slice of its weight, for a slice of the features.

    Constructed as ``nn.Linear`` and the same as long as it is not divided, so that a model can say by it which layers
    read the wide features. :func:`divide_features` divides it. Input (..., columns of this rank), output
    (..., out_features), the same on every rank.
    """

    columns: range | None = None
    """The features of this rank's slice; None if it holds all."""
    _ranks = Shared[SumOverRanks]()

    def forward(self, input: Tensor) -> Tensor:
        if self.columns is None:
            return super().forward(input)
        ranks = self._ranks.of(self)
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
    """Leaves ``linear`` the given columns of its weight; the class changes in place, names and hooks stay.

    Args:
        linear: An ``nn.Linear`` or an undivided :class:`FeatureParallelLinear`, alike on all ranks.
        columns: Consecutive features of this rank; the ranks' together are all features, each once.
        total: Sums the partial outputs of the ranks.

    Raises:
        ConfigurationError: If the layer is divided already, or of a class that may compute something else.
    """
    if type(linear) not in (nn.Linear, FeatureParallelLinear) or getattr(linear, "columns", None) is not None:
        raise ConfigurationError(
            f"{linear} cannot be divided by features: it must be a torch.nn.Linear, undivided"
        )
    linear.__class__ = FeatureParallelLinear
    assert isinstance(linear, FeatureParallelLinear)
    part = linear.weight.detach()[:, columns.start : columns.stop].clone()
    linear.weight = nn.Parameter(part, requires_grad=linear.weight.requires_grad)
    linear.columns, linear._ranks = columns, Shared(total)
    return linear


class _Sum(torch.autograd.Function):
    """The sum over the ranks of a tensor that each has its own term of, in its place."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, total: SumOverRanks) -> Tensor:
        ctx.mark_dirty(partial)
        with waiting():
            total(partial)
        return partial

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
