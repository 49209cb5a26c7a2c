"""Streams of a device that is not there: the order in which its streams would work, on PyTorch's meta device.

Each stream counts the operators that are queued on it, and knows how far others have come when it goes on: by the
events that it waited for (vector clocks, as those of ``torch.cuda._sanitizer``). An operator that uses memory that
another stream writes must have waited for it. Memory belongs to the stream on which it was made; when it is freed,
every other stream that used it must have been recorded. A copy from the host on a stream of its own must be
asynchronous and from pinned memory::

    streams = Streams()
    with streams.patched(), streams.watched():
        ...                                         # raises StreamError, at the operator or at the end
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evener.torch_internals.storages import address, memory_of

META = torch.device("meta")


class StreamError(AssertionError):
    """On a device with streams something would be used too early, or too late, or the host would wait."""


class Event:
    """A moment of a stream, and how far others had come for it."""

    def __init__(self, passed: dict[Stream, int]) -> None:
        self.passed = passed

    def synchronize(self) -> None:
        raise StreamError("the host waits for an event")


class Stream:
    def __init__(self, streams: Streams) -> None:
        self._streams, self._outer = streams, list[Stream]()
        self.passed: dict[Stream, int] = defaultdict(int)
        """How many operators of each stream, of this one too, are over before what is queued here next."""

    @property
    def is_aside(self) -> bool:
        """True for a stream that is not the one that computes."""
        return self is not self._streams.computing

    def record_event(self) -> Event:
        return Event(dict(self.passed))

    def wait_event(self, event: Event) -> None:
        for stream, number in event.passed.items():
            self.passed[stream] = max(self.passed[stream], number)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        raise StreamError("the host waits for a stream")

    def __enter__(self) -> Stream:
        self._outer.append(self._streams.current)
        self._streams.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._streams.current = self._outer.pop()


class Memory:
    """Who made, wrote and used what lies in a storage."""

    def __init__(self, owner: Stream) -> None:
        self.owner = owner
        self.written: dict[Stream, int] = {}
        self.users: set[Stream] = set()
        self.recorded: set[Stream] = {owner}


class Streams:
    """The streams of the device: one that computes, and those that the code makes."""

    def __init__(self) -> None:
        self.computing = self.current = Stream(self)
        self.full = 0
        """How many of the next copies to the device find no room."""
        self.copies = 0
        """How many tensors were copied to the device."""
        self.late: list[str] = []
        self._memory: dict[int, Memory] = {}

    @contextmanager
    def patched(self) -> Iterator[None]:
        """PyTorch's functions of streams are those of this device."""
        with ExitStack() as stack:
            for owner, name, entry in (
                (torch, "Stream", lambda device: Stream(self)),
                (torch.accelerator, "current_stream", lambda device=None: self.current),
                (Tensor, "pin_memory", _pinned),
                (Tensor, "is_pinned", lambda tensor: hasattr(tensor, "lies_pinned")),
                (Tensor, "record_stream", lambda tensor, stream: self._record(tensor, stream)),
            ):
                stack.enter_context(mock.patch.object(owner, name, entry))
            yield

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Every operator of the block is looked at.

        Raises:
            StreamError: At the end, if memory was freed that another stream might still use.
        """
        with _Operators(self):
            yield
        late, self.late = self.late, []
        if late:
            raise StreamError("; ".join(late))

    def _record(self, tensor: Tensor, stream: Stream) -> None:
        self.of(tensor).recorded.add(stream)

    def of(self, tensor: Tensor) -> Memory:
        """Memory that nobody was seen to make is the computing stream's."""
        storage = tensor.untyped_storage()
        place = address(storage)
        if place not in self._memory:
            self._memory[place] = Memory(self.computing)
            weakref.finalize(storage, self._freed, place).atexit = False
        return self._memory[place]

    def _freed(self, place: int) -> None:
        memory = self._memory.pop(place)
        if memory.users - memory.recorded:
            self.late.append("memory was freed that a stream used which was not recorded")

    def queue(self, name: str, given: list[Tensor], found: list[Tensor]) -> None:
        """Queues an operator on the current stream."""
        now = self.current
        for tensor in given:
            memory = self.of(tensor)
            for stream, number in memory.written.items():
                if now.passed[stream] < number:
                    raise StreamError(f"{name} uses what another stream has not written yet")
        now.passed[now] += 1
        known = set(self._memory)
        for tensor in given + found:
            memory = self.of(tensor)
            if address(tensor.untyped_storage()) not in known:
                memory.owner, memory.recorded = now, {now}
            memory.users.add(now)
        for tensor in found:
            self.of(tensor).written[now] = now.passed[now]


def _pinned(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        raise StreamError("only memory of the host can be pinned")
    if tensor.is_pinned():
        return tensor
    copy = tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)  # as PyTorch does
    copy.lies_pinned = True  # type: ignore[attr-defined]
    return copy


def _on_device(values: list[Any]) -> list[Tensor]:
    tensors = [value for value in values if isinstance(value, Tensor) and value.device == META]
    return [part for tensor in tensors for part in memory_of(tensor)]


class _Operators(TorchDispatchMode):
    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options, name = kwargs or {}, str(function)
        given = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        if name.startswith("aten._to_copy") and given[0].device != META and self._streams.current.is_aside:
            self._look_at_copy(given[0], options)
        pinned = options.pop("pin_memory", False)
        found = function(*args, **options)
        if pinned:
            found.lies_pinned = True
        there, at_hand = _on_device(tree_leaves(found)), _on_device(given)
        if there or at_hand:
            self._streams.queue(name, at_hand, there)
        return found

    def _look_at_copy(self, source: Tensor, options: dict[str, Any]) -> None:
        streams = self._streams
        if not hasattr(source, "lies_pinned") or not options.get("non_blocking"):
            raise StreamError("the host waits for a copy to the device")
        if streams.full:
            streams.full -= 1
            raise torch.OutOfMemoryError("out of memory")
        streams.copies += 1
