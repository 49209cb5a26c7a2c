"""A loss whose value is that of the whole batch on every rank, and whose gradient is this rank's part of it.

So what a loop prints is what one device would print, and what it back-propagates adds up to that device's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evener.borrowed.after_backward import when_backward_is_over
from evener.data.batch import map_leaves
from evener.errors import DivergenceError, LossError
from evener.losses import Loss, exact
from evener.losses.torch_losses import is_torch_loss
from evener.prepared.place import Place, check_marks
from evener.step import not_finite

_TOLERANCE = 1e-3
"""Relative; of a loss that is a mean over samples, tried on two parts of a batch in its own precision."""


class OverAll:
    """``loss(outputs, targets)`` over the samples of all ranks. A collective call.

    Args:
        function: As `evener.losses.exact` takes it, or one of the user's that returns the mean over its samples.
    """

    def __init__(self, function: Any, place: Place) -> None:
        self.function, self._place = function, place
        self._exact = _exact_or_none(function)
        self._was_tried = False

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The loss of the whole batch, a tensor without dimensions.

        Raises:
            LossError: If a function of the user's is no mean over samples.
            DivergenceError: If the loss of a rank is not finite, in training; on all ranks alike.
            ConfigurationError: Outside of a prepared loader's batch.
        """
        turn = self._place.turn("the loss was called")
        if self._exact is not None:
            count = self._exact.count(targets)
            return joined(self._place, self._exact.total(outputs, targets), count, self._exact.divisor)
        if turn.samples > 1 and not self._was_tried:
            self._was_tried = True
            check_mean(self.function, outputs, targets, turn.samples)
        turn.is_counted = True
        return global_mean(self._place, self.function(outputs, targets), turn.samples)

    def __repr__(self) -> str:
        return f"OverAll({self.function!r})"


def _exact_or_none(function: Any) -> Loss | None:
    try:
        return exact(function)
    except LossError:
        if is_torch_loss(function) or not callable(function):
            raise
        return None


@torch.no_grad()
def check_mean(function: Callable[[Any, Any], Tensor], outputs: Any, targets: Any, samples: int) -> None:
    """Raises:
    LossError: If the mean over some samples is not made of the means over two parts of them.
    """
    half = samples // 2

    def rows(tree: Any, start: int, stop: int) -> Any:
        return map_leaves(lambda leaf: leaf[start:stop] if _has_rows(leaf, samples) else leaf, tree)

    parts = [(0, half), (half, samples)]
    found = [
        float(function(rows(outputs, *part), rows(targets, *part))) * (part[1] - part[0]) for part in parts
    ]
    whole = float(function(outputs, targets)) * samples
    if math.isfinite(whole) and abs(sum(found) - whole) > _TOLERANCE * max(abs(whole), *map(abs, found)):
        name = getattr(function, "__qualname__", type(function).__name__)
        raise LossError(
            f"{name} is no mean over samples: over {samples} of them it is {whole / samples:.6g}, and its parts make "
            f"{sum(found) / samples:.6g}. Ranks cannot know how many terms it has: give torch's own loss, or an "
            "evener.loss that says its count"
        )


def _has_rows(leaf: Any, samples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == samples


def global_mean(place: Place, value: Tensor, count: float | Tensor) -> Tensor:
    """From this rank's mean over ``count`` terms the mean over those of all."""
    number = float(count)
    if number:
        return joined(place, value * number, number)
    finite = bool(torch.isfinite(value))  # a mean of nothing is none, and has no gradient to go through
    return joined(place, value * 0 if finite else value.new_zeros((), requires_grad=value.requires_grad), 0.0)


def joined(
    place: Place, total: Tensor, count: float | Tensor, divisor: Callable[[float], float] = float
) -> Tensor:
    """The sum of all ranks' totals over the divisor that their counts make."""
    turn = place.turn("the loss was computed")
    counts = bool(turn.micro.weight)
    own = (float(total.detach()), float(count)) if counts else (0.0, 0.0)
    rows = place.exchange("the loss", turn.mark, *own)
    check_marks([row[0] for row in rows])
    in_training = total.requires_grad and torch.is_grad_enabled()
    for rank, row in enumerate(rows) if in_training else ():
        if not math.isfinite(row[1]):
            raise DivergenceError(not_finite(f"the loss is {row[1]} in step {place.steps} on rank {rank}"))
    over = divisor(sum(row[2] for row in rows))
    value = sum(row[1] for row in rows) / over if over else math.nan
    if not in_training:
        return total.detach().new_tensor(value)
    factor = place.mean.ranks / (over or 1.0) * counts
    result: Tensor = _Joined.apply(total, value, factor, place)  # type: ignore[no-untyped-call]
    return result


class _Joined(torch.autograd.Function):
    """A number with another's gradient, ``factor`` times; tells the place when the backward pass is over."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, value: float, factor: float, place: Place) -> Tensor:
        ctx.factor, ctx.place = factor, place
        return total.new_tensor(value).reshape(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.place.comes_to_an_end(when_backward_is_over)
        return gradients[0] * ctx.factor, None, None, None
