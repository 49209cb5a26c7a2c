"""Clips gradients by their norm over all ranks, whole and divided, dense and sparse."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from evener.components.exact_sum.norm import exact_norm, over_ranks
from evener.components.gradients import values, with_gradient
from evener.components.sharded_tensor.shard_spec import by_axes
from evener.distributed.mesh import Mesh

Summed = Callable[[Tensor], Tensor]
"""Sums a square of a norm over the ranks that hold other gradients."""


def clip(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    mesh: Mesh,
    summed: Summed | None = None,
    exact: bool = False,
) -> Tensor:
    """Clips the gradients: scales them so that their total 2-norm, with divided gradients counted whole, is at most
    ``max_norm``. All ranks must call this together if some are divided.

    Works like ``torch.nn.utils.clip_grad_norm_``, but also for sparse gradients and those of shards. Returns the norm
    before clipping.

    Args:
        exact: Whether the norm must have the same bits on any division of the parameters.
    """
    given = list(parameters)
    found = exact_norm(given, mesh) if exact else norm_over(given, mesh, summed)
    factor = (max_norm / (found + 1e-6)).clamp(max=1.0)
    for value in map(values, with_gradient(given)):
        value.mul_(factor.to(value.device))
    return found


class Clipping:
    """Clips the gradients of every update to a maximum norm, and records their norm.

    Args:
        max_norm: The maximum norm. None disables clipping.
        exact: Whether the norm must have the same bits on any division of the parameters.
    """

    def __init__(self, max_norm: float | None, exact: bool = False) -> None:
        self._max_norm, self._exact = max_norm, exact
        self.measures = max_norm is not None
        """True if the norm is computed. Set it to True to get the norm without clipping."""
        self.norm: Tensor | None = None
        """The norm of all gradients in the last update, before clipping. None if it was not computed or the update was
        skipped."""
        self.summed: Summed | None = None
        """Set if other ranks update other parameters, with gradients of which this rank knows nothing."""

    def __call__(self, parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
        if self._max_norm is not None:
            self.norm = clip(parameters, self._max_norm, mesh, self.summed, self._exact)
        elif self.measures:
            self.norm = (
                exact_norm(parameters, mesh) if self._exact else norm_over(parameters, mesh, self.summed)
            )


def norm_over(parameters: Iterable[nn.Parameter], mesh: Mesh, summed: Summed | None = None) -> Tensor:
    """Returns the 2-norm of all gradients together, without making the host wait. If some are divided, or with
    ``summed``, all ranks must call this together."""
    groups = by_axes(parameters)
    whole = norm(groups.pop(()))
    if summed is not None:
        return summed(whole.double().square()).sqrt().to(whole.dtype)
    if not groups:
        return whole
    square = whole.double().square()
    for axes in sorted(groups):
        square = square + over_ranks(norm(groups[axes]).double().square(), mesh, axes)
    return square.sqrt()


def norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Returns the 2-norm of the gradients that this rank holds."""
    given = list(parameters)
    found = [values(parameter) for parameter in with_gradient(given)]
    if found:
        return nn.utils.get_total_norm(found)
    # Other ranks may have gradients, and wait for this rank's number on the device.
    return torch.zeros((), device=given[0].device if given else None)
