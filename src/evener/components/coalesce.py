"""Sends several tensors as one message, because every message has a fixed cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evener.hardware.timers import waiting


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups tensors by type and device. The tensors of a group can be sent as one."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


def sent_as_one(tensors: Sequence[Tensor], send: Callable[[Tensor], Any]) -> None:
    """Concatenates ``tensors``, passes the result to ``send``, which changes it in place, and copies it back. The
    tensors must be dense, of one type and on one device."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    send(flat)
    for tensor, part in zip(tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def broadcast_together(tensors: Iterable[Tensor], group: dist.ProcessGroup, source: int) -> None:
    """Broadcasts the tensors of rank ``source`` of ``group``, with one message for each type and device. All ranks must
    call this together."""
    for alike in by_kind(tensors):
        with waiting():
            sent_as_one(alike, partial(dist.broadcast, group=group, group_src=source))
