"""Gathers rows of all ranks, with gradients for this rank's own rows.

A loss that every rank computes from the gathered rows is the same on all. The gradient that reaches a rank's own rows
is their part of its gradient. It is multiplied by the number of ranks, as that of every prepared loss, because
gradients are averaged over the ranks later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evener.collectives.all_gather_rows import rows_of_all
from evener.data.division import own_slice
from evener.training.prepare.loop_state import LoopState


def gathered(leaf: Tensor, shares: Sequence[int], place: LoopState) -> Tensor:
    """Returns (rows of all ranks, ...) for (rows of this rank, ...), of which the first ``shares[rank]`` count."""
    own = leaf[: shares[place.rank]]
    if not (own.requires_grad and torch.is_grad_enabled()):
        return _rows(own, shares, place)
    found: Tensor = _Gathered.apply(own, tuple(shares), place)  # type: ignore[no-untyped-call]
    return found


def _rows(own: Tensor, shares: Sequence[int], place: LoopState) -> Tensor:
    if place.world_size == 1:
        return own.detach()
    here = own.detach().to(place.session.device)  # the backend sends from this device
    return rows_of_all(here, shares, place.session.world).to(own.device)


class _Gathered(torch.autograd.Function):
    """Rows of all ranks, with a gradient for this rank's. Reports to the loop when a backward pass reaches them."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, shares: tuple[int, ...], place: LoopState) -> Tensor:
        ctx.place, ctx.own = place, own_slice(shares, place.rank)
        found = _rows(own, shares, place)
        return found.clone() if found.data_ptr() == own.data_ptr() else found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.place.comes_to_loss()
        return gradients[0][ctx.own] * ctx.place.mean.ranks, None, None
