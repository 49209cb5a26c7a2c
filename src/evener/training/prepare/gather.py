"""Gathers rows of all ranks, with gradients for this rank's own rows.

A loss that every rank computes from the gathered rows is the same on all, and so are the gradients of these rows; ranks
compare their size. What reaches a rank's own rows is their part of the gradient. It is multiplied by the number of
ranks, as that of every prepared loss, because gradients are averaged over the ranks later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from evener.collectives.all_gather_rows import rows_of_all
from evener.data.batch import like_sequence, map_leaves
from evener.data.division import own_slice
from evener.training.prepare.loop_state import LoopState


def gathered(leaf: Tensor, shares: Sequence[int], place: LoopState) -> Tensor:
    """Returns (rows of the whole batch, ...) for (rows of this rank's part, ...).

    Args:
        shares: The numbers of rows of the parts, in order. So many of the first rows of each count.
    """
    own = leaf[: shares[place.data.index]]
    if not (own.requires_grad and torch.is_grad_enabled()):
        return _rows(own, shares, place)
    found: Tensor = _Gathered.apply(own, tuple(shares), place)  # type: ignore[no-untyped-call]
    return found


def _rows(own: Tensor, shares: Sequence[int], place: LoopState) -> Tensor:
    if place.world_size == 1:
        return own.detach()
    speaker_of = dict(zip(place.data.speakers, shares, strict=True))
    sent = own if place.rank in speaker_of else own[:0]  # one rank of those that compute a part sends it
    here = sent.detach().to(place.session.device)  # the backend sends from this device
    counts = [speaker_of.get(rank, 0) for rank in range(place.world_size)]
    return rows_of_all(here, counts, place.session.world).to(own.device)


def gathered_entries(
    lists: Mapping[Any, Sequence[Any]], shares: Sequence[int], place: LoopState
) -> dict[Any, Any]:
    """Returns lists of the whole batch for lists of one entry per sample of this rank, each under its key.

    Entries may be of any form, and tensors of any shape. A collective call, in which objects go from host to host.
    """

    def sent(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return _OfDevice(leaf.detach().cpu()) if leaf.device.type != "cpu" else leaf.detach()

    def received(leaf: Any) -> Any:
        return leaf.on_host.to(place.session.device) if isinstance(leaf, _OfDevice) else leaf

    def own_leaf(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled()):
            return leaf
        return _OwnEntry.apply(leaf, place)  # type: ignore[no-untyped-call]

    count = shares[place.data.index]
    own_entries = {key: list(each)[:count] for key, each in lists.items()}
    said = place.session.control.gather_objects(
        {key: map_leaves(sent, each) for key, each in own_entries.items()}
    )
    parts = place.data.of_parts(said)
    made = {}
    for key, given in lists.items():
        of_parts = [
            map_leaves(own_leaf, own_entries[key])
            if part == place.data.index
            else map_leaves(received, of_part[key])
            for part, of_part in enumerate(parts)
        ]
        made[key] = like_sequence(given, list(chain.from_iterable(of_parts)))
    return made


class _OfDevice:
    """A tensor of a device, on its way between hosts."""

    def __init__(self, on_host: Tensor) -> None:
        self.on_host = on_host


class _OwnEntry(torch.autograd.Function):
    """A tensor of one of this rank's samples, beside those of others. Reports to the loop as gathered rows do."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, place: LoopState) -> Tensor:
        ctx.place = place
        return own.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.place.comes_to_loss()
        return gradients[0] * ctx.place.mean.ranks, None


class _Gathered(torch.autograd.Function):
    """Rows of all ranks, with a gradient for this rank's. Reports to the loop when a backward pass reaches them."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, shares: tuple[int, ...], place: LoopState) -> Tensor:
        ctx.place, ctx.own = place, own_slice(shares, place.data.index)
        found = _rows(own, shares, place)
        return found.clone() if found.data_ptr() == own.data_ptr() else found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.place.comes_to_loss(rows=gradients[0])
        return gradients[0][ctx.own] * ctx.place.mean.ranks, None, None
