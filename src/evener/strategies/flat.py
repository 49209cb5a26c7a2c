"""Several tensors sent as one: a message has a cost of its own, however short it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


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
