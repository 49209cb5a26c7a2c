"""Copies tensors between host and devices, without waiting for previously queued work where that is safe.

``tensor.to("cuda")`` is queued behind all earlier work on the device, and the host waits for it. A copy from pinned
memory is asynchronous, and the host does not wait. This module is for the small tensors that a step sends itself. The
samples of a batch are copied during the previous step (:mod:`evener.data.prefetch`).

The other way the host has to wait: an asynchronous copy to it returns memory in which the numbers will be, and nothing
keeps the host from reading it before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from evener.hardware.accelerators import WITH_STREAMS

Sender = Callable[[Tensor, torch.device], Tensor]


def by_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a device synchronously. Returns the tensor itself if it is already there."""
    return tensor.to(device)


def from_pinned_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a device in the device's current stream. PyTorch keeps the pinned copy until it is read."""
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if tensor.device.type == "cpu"
        else tensor.to(device)
    )


SENDERS: dict[str, Sender] = dict.fromkeys(WITH_STREAMS, from_pinned_memory)
"""Copy function by device type. Other types use `by_copy`."""


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to ``device``. May return before the copy is complete."""
    return SENDERS.get(device.type, by_copy)(tensor, device)


def move_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on ``device``. What is queued on a device waits for a copy to it; the host does by itself."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def copy_tensor(to: Tensor, values: Tensor) -> None:
    """Copies ``values`` to the tensor ``to``, with the same waits as :func:`move_tensor`."""
    to.copy_(values, non_blocking=to.device.type != "cpu")
