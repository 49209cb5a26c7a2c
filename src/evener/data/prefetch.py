"""Delivers batches to the training step: on the device, in the data type of the run, cut to what this rank computes.

::

    host memory ──▶ Delivery: to the device, each leaf converted ──▶ cut_to: each micro-batch cut ──▶ training step

A batch gets to the device not at all, by a copy, or by a copy that overlaps with the previous step. ``delivery_to``
chooses the way once, so no later code needs to check for a CUDA device. Each way is a function from an iterator of
batches in host memory to an iterator of batches on the device. Its ``ahead`` is the number of batches that it reads
ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from evener.data.batch import Batch, MicroBatch
from evener.hardware.accelerators import WITH_STREAMS

Batches = Generator[Batch, None, None]
Convert = Callable[[Any], Any]
"""Converts a leaf of inputs or targets on the device, such as to the data type of the run."""


class Delivery(Protocol):
    """Turns an iterator of batches in host memory into an iterator of the same batches on the device."""

    ahead: int
    """The number of batches read after the last one returned."""

    def __call__(self, batches: Batches) -> Batches: ...


class NoTransfer:
    """Leaves batches in host memory, for the CPU."""

    ahead = 0

    def __init__(self, convert: Convert | None = None) -> None:
        self._convert = convert

    def __call__(self, batches: Batches) -> Batches:
        convert = self._convert
        return batches if convert is None else _each(lambda batch: batch.map(convert), batches)


class Copy:
    """Copies each batch to the device when it is requested."""

    ahead = 0

    def __init__(self, device: torch.device, convert: Convert | None = None) -> None:
        self._move = partial(Batch.to, device=device, convert=convert)

    def __call__(self, batches: Batches) -> Batches:
        return _each(self._move, batches)


class CopyOnSideStream:
    """Copies batch ``g + 1`` from pinned memory on a separate stream while step ``g`` computes."""

    ahead = 1

    def __init__(self, device: torch.device, convert: Convert | None = None) -> None:
        self._device, self._convert = device, convert
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
            moved = batch.map(_pinned).to(self._device, non_blocking=True, convert=self._convert)
            return moved, self._stream.record_event()


DELIVERIES: dict[str, Callable[[torch.device, Convert | None], Delivery]] = {
    "cpu": lambda device, convert: NoTransfer(convert),
    **dict.fromkeys(WITH_STREAMS, CopyOnSideStream),
}
"""The delivery for each type of device. :class:`Copy` serves all other types."""


def delivery_to(device: torch.device, convert: Convert | None = None) -> Delivery:
    """Returns the delivery for ``device``, which applies ``convert`` to each leaf there."""
    return DELIVERIES.get(device.type, Copy)(device, convert)


def serial_delivery_to(device: torch.device, convert: Convert | None = None) -> Delivery:
    """Returns the delivery for ``device`` that reads no batch ahead."""
    return NoTransfer(convert) if device.type == "cpu" else Copy(device, convert)


def cut_to(piece: Callable[[MicroBatch], MicroBatch] | None, batches: Batches) -> Batches:
    """Returns an iterator of the batches with ``piece`` applied to each micro-batch, and to its copy in host memory."""
    return batches if piece is None else _each(lambda batch: batch.cut(piece), batches)


def _each(stage: Callable[[Batch], Batch], batches: Batches) -> Batches:
    with closing(batches):
        yield from map(stage, batches)  # holds no batch while the step computes


def _pinned(leaf: Any) -> Any:
    return leaf.pin_memory() if isinstance(leaf, Tensor) and leaf.device.type == "cpu" else leaf


def _record(stream: torch.Stream, leaf: Any) -> Any:
    """Keeps the allocator from reusing the memory of ``leaf`` before ``stream`` is done with it."""
    if hasattr(leaf, "record_stream"):
        leaf.record_stream(stream)
    return leaf
