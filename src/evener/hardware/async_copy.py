"""Sending a tensor of the host to a device without waiting for the work that was queued before it.

``tensor.to("cuda")`` lies in the device's queue behind all that is there already, and the host waits for it. From
pinned memory, which the device reads by itself, it need not. The samples of a batch travel beside the step before
(:mod:`evener.data.prefetch`); this is for what little a step sends itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from evener.hardware.accelerators import WITH_STREAMS

Sender = Callable[[Tensor, torch.device], Tensor]


def by_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device whose work is done when a call returns; itself if it is there."""
    return tensor.to(device)


def from_pinned_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device once the current stream has come so far; PyTorch keeps the pinned copy until then."""
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if tensor.device.type == "cpu"
        else tensor.to(device)
    )


SENDERS: dict[str, Sender] = dict.fromkeys(WITH_STREAMS, from_pinned_memory)
"""By type of device; to any other a tensor is copied."""


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on ``device``; the host may go on before it has arrived."""
    return SENDERS.get(device.type, by_copy)(tensor, device)
