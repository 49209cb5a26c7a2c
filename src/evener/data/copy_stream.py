"""Copies samples to a device on a stream of their own, while the device computes.

::

    host       queue copy g + 2 │ queue step g │ queue copy g + 3 │ queue step g + 1
    copies          copy g + 2 ──────────────▶       copy g + 3 ──────────────▶
    compute    step g - 1 │ wait for copy g + 1, step g │ wait for copy g + 2, step g + 1

The host waits for nothing. Three things hold it together:

- The copy is made from pinned memory: only then does it not wait for the device. ``pin_memory()`` takes its memory from
  PyTorch's cache, which pins it once and gives it out again when the event of the copy that reads it has passed.
- The stream that computes waits for the event of the copy before it uses what was copied.
- What was copied is ``record_stream``-ed: when it is freed, its memory is used again only after what the computing
  stream was asked to do until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from evener.data.batch import has_to, move
from evener.torch_internals.dispatch import DispatchMode, wraps
from evener.torch_internals.storages import address, memory_of

T = TypeVar("T")
Convert = Callable[[Any], Any]
"""Converts a leaf of inputs or targets on the device, such as to the data type of the run. A tensor stays a tensor."""


class CopyStream:
    """A stream of copies to ``device``, which must have streams, with ``convert`` applied to each leaf there."""

    def __init__(self, device: torch.device, convert: Convert | None = None) -> None:
        self._device, self._convert = device, convert
        self._stream = torch.Stream(device)

    def start(self, copy: Callable[[Callable[[Any], Any]], T]) -> Callable[[], T]:
        """Queues a copy. Returns a function that makes the current stream wait for it, and returns it. Call it once.

        Args:
            copy: Takes a function that moves a leaf, and returns what has been moved by it.
        """
        made, computing = list[Tensor](), torch.accelerator.current_stream(self._device)
        with self._stream:
            copied = copy(partial(self._moved, made, computing))
            return partial(self._arrived, copied, made, self._stream.record_event())

    def _arrived(self, copied: T, made: list[Tensor], event: torch.Event) -> T:
        stream = torch.accelerator.current_stream(self._device)
        stream.wait_event(event)
        for each in made:
            each.record_stream(stream)
        return copied

    def _moved(self, made: list[Tensor], computing: torch.Stream, leaf: Any) -> Any:
        convert = self._convert
        if type(leaf) is Tensor and leaf.is_cpu and leaf.layout is torch.strided:
            there = pinned(leaf).to(self._device, non_blocking=True)
            there = there if convert is None else convert(there)
            made.append(there)
            return there
        if not isinstance(leaf, Tensor) and not has_to(leaf):
            return leaf if convert is None else convert(leaf)
        with _LeafTransfer(self._device, self._stream, computing, made):
            on_host = isinstance(leaf, Tensor) and leaf.is_cpu
            there = move(leaf.pin_memory() if on_host else leaf, self._device, non_blocking=True)
            return there if convert is None else convert(there)


def pinned(tensor: Tensor) -> Tensor:
    """Returns a strided tensor of the host in pinned memory. One that uses an element twice, such as an expanded one,
    which ``pin_memory()`` refuses, becomes contiguous."""
    if tensor.is_contiguous() or tensor.is_pinned():
        return tensor.pin_memory()
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


class _LeafTransfer(DispatchMode):
    """Sees the tensors of a leaf that is no plain tensor of the host, such as a ``PackedSequence``, on its way.

    Tensors that are made on the way are added to ``made``. For one that was on the device before, the stream of copies
    waits for the stream that computes, which may be about to make it.
    """

    def __init__(
        self, device: torch.device, stream: torch.Stream, computing: torch.Stream, made: list[Tensor]
    ) -> None:
        super().__init__()
        self._device, self._stream, self._computing, self._made = device, stream, computing, made
        self._known: dict[int, Tensor] = {}
        """The tensors that were seen, by the address of their storage, which they keep from being used again."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(wraps, types)):
            return NotImplemented  # calls operators on the tensors inside next
        options = kwargs or {}
        for was_there in self._new((*args, *options.values())):
            self._stream.wait_stream(self._computing)
            was_there.record_stream(self._stream)
        found = function(*args, **options)
        self._made += self._new((found,))
        return found

    def _new(self, values: Iterable[Any]) -> list[Tensor]:
        """Returns the tensors on the device whose memory was not seen before."""
        found = []
        for value in values:
            if isinstance(value, tuple | list):
                found += self._new(value)
            for part in memory_of(value) if isinstance(value, Tensor) else ():
                if (
                    part.device.type == self._device.type
                    and address(part.untyped_storage()) not in self._known
                ):
                    self._known[address(part.untyped_storage())] = part
                    found.append(part)
        return found
