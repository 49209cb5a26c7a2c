"""Reading a number off a device without waiting for the work that was queued after it.

``float(tensor)`` on a GPU waits for all that was queued before it. A readout is started where the number is computed
and read where it is needed: it then waits for the number alone, while what was queued in between goes on::

    loss = read(total)         # queued behind the forward pass
    total.backward()           # queued
    loss.value()               # waits for the forward pass only
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Readout(Protocol):
    """A number on its way."""

    def value(self) -> float:
        """The number; waits until it has been computed."""


class _Here:
    """A number of the host."""

    def __init__(self, number: float | Tensor) -> None:
        self._number = number

    def value(self) -> float:
        return float(self._number)


class _OnTheWay:
    """A number that is copied from a CUDA device to pinned memory."""

    def __init__(self, number: Tensor) -> None:
        self._copy = torch.empty(number.shape, dtype=number.dtype, pin_memory=True)
        self._copy.copy_(number.detach(), non_blocking=True)
        self._copied = torch.cuda.current_stream(number.device).record_event()

    def value(self) -> float:
        self._copied.synchronize()
        return float(self._copy)


def read(number: float | Tensor) -> Readout:
    """Starts to read a number or a tensor of one element."""
    if isinstance(number, Tensor) and number.device.type == "cuda":
        return _OnTheWay(number)
    return _Here(number.detach() if isinstance(number, Tensor) else number)
