"""How a batch reaches the device: as it is, by a copy, or by a copy that runs beside the previous step.

Chosen once by ``delivery_to``, so that nobody downstream asks whether there is a CUDA device. Each is a
function from an iterator of batches on the host to one of batches on the device, and says how many batches it
holds back.
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
    """From batches on the host to the same batches on the device."""

    ahead: int
    """Batches that it draws beyond the one handed out."""

    def __call__(self, batches: Batches) -> Batches: ...


class NoTransfer:
    """The stand-in for devices that read the host's memory."""

    ahead = 0

    def __call__(self, batches: Batches) -> Batches:
        return batches


class Copy:
    """Copies when the batch is asked for."""

    ahead = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, batches: Batches) -> Batches:
        with closing(batches):
            yield from (batch.to(self._device) for batch in batches)


class CopyOnSideStream:
    """Copies batch ``g + 1`` from pinned memory on a stream of its own while step ``g`` computes."""

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
        """Queue the copy of ``batch``; the event is recorded after it."""
        if batch is None:
            return None
        with self._stream:
            moved = batch.map(_pinned).to(self._device, non_blocking=True)
            return moved, self._stream.record_event()


DELIVERIES: dict[str, Callable[[torch.device], Delivery]] = {
    "cpu": lambda device: NoTransfer(),
    **dict.fromkeys(WITH_STREAMS, CopyOnSideStream),
}
"""By type of device; to any other batches are copied when they are asked for."""


def delivery_to(device: torch.device) -> Delivery:
    """The delivery that suits ``device``."""
    return DELIVERIES.get(device.type, Copy)(device)


def _pinned(leaf: Any) -> Any:
    return leaf.pin_memory() if isinstance(leaf, Tensor) and leaf.device.type == "cpu" else leaf


def _record(stream: torch.Stream, leaf: Any) -> Any:
    """Keep the allocator from reusing the memory of ``leaf`` before ``stream`` is done with it."""
    if hasattr(leaf, "record_stream"):
        leaf.record_stream(stream)
    return leaf
