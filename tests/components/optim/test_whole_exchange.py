"""Tensors of several types between ranks in one message."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evener.components.optim.whole_exchange import Form, start_exchange

CPU = torch.device("cpu")


def tensors_from(rank: int, to: int) -> list[Tensor]:
    """Other numbers of tensors between each two ranks, one of them empty and one not contiguous."""
    made = [
        torch.full((rank + 1, to), 10 * rank + to, dtype=torch.float64),
        torch.arange(5, dtype=torch.bfloat16) + rank,
        torch.arange(6, dtype=torch.float32).view(2, 3).T * (to + 1),
        torch.tensor(rank, dtype=torch.int8),
    ]
    return made[: 2 * rank + to]


def exchanged() -> list[bool]:
    own, world = dist.get_rank(), range(dist.get_world_size())
    forms: list[list[Form]] = [[(tuple(t.shape), t.dtype) for t in tensors_from(rank, own)] for rank in world]
    group = dist.group.WORLD
    assert group is not None
    came = start_exchange(group, [tensors_from(own, to) for to in world], forms, CPU)()
    return [
        len(tensors) == len(tensors_from(rank, own))
        and all(map(torch.equal, tensors, tensors_from(rank, own)))
        for rank, tensors in enumerate(came)
    ]


def test_each_rank_gets_what_the_others_sent(ranks: Any) -> None:
    assert ranks(3).run(exchanged) == [[True] * 3] * 3
