"""Delivers batches to the training step: on the device, in the data type of the run, cut to what this rank computes.

::

    host memory ──▶ Delivery: to the device, each leaf converted ──▶ cut_to: each micro-batch cut ──▶ training step

A batch gets to the device not at all, by a copy, or by a copy that overlaps with earlier steps. ``delivery_to`` chooses
the way once, so no later code needs to check for a CUDA device. Each way is a function from an iterator of batches in
host memory to an iterator of batches on the device. Its ``ahead`` is the number of batches that it reads ahead. The
engine asks for a batch one step early. So one batch read ahead makes two that are on the device, or on their way to it,
while a step computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Protocol

import torch

from evener.data.batch import Batch, MicroBatch
from evener.data.copy_stream import Convert, CopyStream
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
    """Copies batches on a stream of their own, ``ahead`` batches before they are requested."""

    def __init__(self, device: torch.device, convert: Convert | None = None, ahead: int = 1) -> None:
        self.ahead = ahead
        self._copies = CopyStream(device, convert)

    def __call__(self, batches: Batches) -> Batches:
        with closing(batches):
            started = deque(map(self._start, islice(batches, self.ahead)))
            while True:
                started.extend(map(self._start, islice(batches, 1)))
                if not started:
                    return
                yield started.popleft()()  # holds no batch while the step computes

    def _start(self, batch: Batch) -> Callable[[], Batch]:
        """Starts to copy a batch. Returns a function that returns the copy.

        A batch for which the device has no room yet stays on the host until it is requested.
        """
        try:
            return self._copies.start(batch.moved)
        except torch.OutOfMemoryError:
            return lambda: self._copies.start(batch.moved)()


DELIVERIES: dict[str, Callable[[torch.device, Convert | None, int], Delivery]] = {
    "cpu": lambda device, convert, ahead: NoTransfer(convert),
    **dict.fromkeys(WITH_STREAMS, CopyOnSideStream),
}
"""The delivery for each type of device. :class:`Copy` serves all other types."""


def delivery_to(device: torch.device, convert: Convert | None = None, ahead: int = 1) -> Delivery:
    """Returns the delivery for ``device``, which applies ``convert`` to each leaf there.

    Args:
        ahead: The number of batches to read ahead, if copies to the device can overlap with steps.
    """
    made = DELIVERIES.get(device.type)
    return Copy(device, convert) if made is None else made(device, convert, ahead)


def cut_to(piece: Callable[[MicroBatch], MicroBatch] | None, batches: Batches) -> Batches:
    """Returns an iterator of the batches with ``piece`` applied to each micro-batch, and to its copy in host memory."""
    return batches if piece is None else _each(lambda batch: batch.cut(piece), batches)


def _each(stage: Callable[[Batch], Batch], batches: Batches) -> Batches:
    with closing(batches):
        yield from map(stage, batches)  # holds no batch while the step computes
