"""Moves batches to the device: not at all, by a copy, or by a copy that overlaps with the previous step.

``delivery_to`` chooses the way once, so no later code needs to check for a CUDA device. Each way is a function from an
iterator of batches in host memory to an iterator of batches on the device. Its ``ahead`` is the number of batches that
it reads ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from evener.data.batch import Batch
from evener.hardware.accelerators import WITH_STREAMS

Batches = Generator[Batch, None, None]


class Delivery(Protocol):
    """Turns an iterator of batches in host memory into an iterator of the same batches on the device."""

    ahead: int
    """The number of batches read after the last one returned."""

    def __call__(self, batches: Batches) -> Batches: ...


class NoTransfer:
    """Leaves batches in host memory, for the CPU."""

    ahead = 0

    def __call__(self, batches: Batches) -> Batches:
        return batches


class Copy:
    """Copies each batch to the device when it is requested."""

    ahead = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, batches: Batches) -> Batches:
        with closing(batches):
            yield from (batch.to(self._device) for batch in batches)


class CopyOnSideStream:
    """Copies batch ``g + 1`` from pinned memory on a separate stream while step ``g`` computes."""

    ahead = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def __call__(self, batches: Batches) -> Batches:
        with closing(batches):
            ahead = self._start(next(batches, None))
            while ahead is not None:
                batch, copied = ahead
                ahead = self._start(next(batches, None))
                stream = torch.accelerator.current_stream(self._device)
                stream.wait_event(copied)
                batch.map(partial(_record, stream))
                yield batch

    def _start(self, batch: Batch | None) -> tuple[Batch, torch.Event] | None:
        """Queues the copy of ``batch``. Returns the copy and an event that is recorded after it; None for None."""
        if batch is None:
            return None
        with self._stream:
            moved = batch.map(_pinned).to(self._device, non_blocking=True)
            return moved, self._stream.record_event()


DELIVERIES: dict[str, Callable[[torch.device], Delivery]] = {
    "cpu": lambda device: NoTransfer(),
    **dict.fromkeys(WITH_STREAMS, CopyOnSideStream),
}
"""The delivery for each type of device. :class:`Copy` serves all other types."""


def delivery_to(device: torch.device) -> Delivery:
    """Returns the delivery for ``device``."""
    return DELIVERIES.get(device.type, Copy)(device)


def _pinned(leaf: Any) -> Any:
    return leaf.pin_memory() if isinstance(leaf, Tensor) and leaf.device.type == "cpu" else leaf


def _record(stream: torch.Stream, leaf: Any) -> Any:
    """Keeps the allocator from reusing the memory of ``leaf`` before ``stream`` is done with it."""
    if hasattr(leaf, "record_stream"):
        leaf.record_stream(stream)
    return leaf
