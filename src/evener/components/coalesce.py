"""Several tensors sent as one: a message has a cost of its own, however short it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evener.hardware.timers import waiting


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those of one type and device together, which can be sent as one."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


def sent_as_one(tensors: Sequence[Tensor], send: Callable[[Tensor], Any]) -> None:
    """Has ``send`` change one tensor of all of these, dense and of one kind, in place, and them accordingly."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    send(flat)
    for tensor, part in zip(tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def broadcast_together(tensors: Iterable[Tensor], group: dist.ProcessGroup, source: int) -> None:
    """Gives all ranks of ``group`` the tensors of its rank ``source``, in a message for each kind."""
    for alike in by_kind(tensors):
        with waiting():
            sent_as_one(alike, partial(dist.broadcast, group=group, group_src=source))
