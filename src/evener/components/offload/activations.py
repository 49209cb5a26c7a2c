"""What forward passes save for backward, outside until backward asks for it.

::

    forward     save a ─ save b ─ save c        out: as soon as it is saved
    outside         a       b       c
    backward    c ─ b ─ a                       back: each while the one saved after it is used

Autograd asks what to do with each tensor that it saves (``torch.autograd.graph.saved_tensors_hooks``). Memory is what
goes, and not tensors: what is saved twice, or as two views of one memory, goes once, and comes back as such. Weights,
buffers and the model's inputs stay, as somebody else holds them; so does what is small.

Autograd does not compare versions of what hooks have saved, so that it is done here: a tensor that was written in place
since is the same error as without.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from evener.components.offload.copy_stream import Beside
from evener.components.offload.host_storage import Outside
from evener.components.offload.layout import Form, bytes_of, is_plain
from evener.data.batch import map_leaves
from evener.errors import ConfigurationError, TaskError
from evener.hardware.memory import made_as
from evener.hardware.memory.counters import ACTIVATIONS
from evener.torch_internals.fake_tensors import active_fake_mode
from evener.torch_internals.storages import address
from evener.torch_internals.version import version
from evener.torch_internals.views import base_of

T = TypeVar("T")

SMALLEST = 2**20
"""Bytes of memory that is worth the way."""
AHEAD = 2
"""How many come back before they are asked for, and how many may be on their way out."""


class Stays:
    """A saved tensor that is kept as it is."""

    def __init__(self, tensor: Tensor) -> None:
        # An output that is saved by what made it would keep itself alive.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = version(tensor)

    def unpacked(self) -> Tensor:
        _compare(self._tensor, self._version)
        return self._tensor


class Coming:
    """Memory on its way back to the device."""

    def __init__(self, room: Tensor, device: torch.device, beside: Beside) -> None:
        with made_as(ACTIVATIONS):
            self._there = torch.empty(room.numel(), dtype=torch.uint8, device=device)
        self._beside, self._arrived = beside, False
        with beside.lane():
            self._there.copy_(room, non_blocking=True)
            self._mark = beside.mark()

    def arrived(self) -> Tensor:
        """It, for what is queued from now on."""
        if not self._arrived:
            self._beside.wait(self._mark)
            self._arrived = True
        return self._there

    def __del__(self) -> None:
        with suppress(AttributeError):  # where there was no memory for it
            self.arrived()  # else what is made in its place could be overwritten by what comes


class Memory:
    """Memory that has gone outside.

    Args:
        tensor: Which lies in it.
        earlier: What went before, and is asked for after this.
    """

    def __init__(self, tensor: Tensor, outside: Outside, earlier: Memory | None) -> None:
        numbers = bytes_of(tensor)
        self._outside, self._device = outside, tensor.device
        self._room = outside.take(numbers.numel())[: numbers.numel()]
        self._earlier = None if earlier is None else weakref.ref(earlier)
        self._coming: Coming | None = None
        self._back: Tensor | None = None
        self._wanted = 0
        if outside.apart:
            with outside.beside.lane():
                self._room.copy_(numbers, non_blocking=True)
                self.mark = outside.beside.mark()
        else:
            self._room.copy_(numbers)
        outside.rest(self._room)

    def come(self, ahead: int) -> None:
        """So many set out for the device, if there is memory for them: this one, and those that went before."""
        if not ahead or not self._outside.apart:
            return
        if self._coming is None and self._back is None:
            try:
                self._coming = Coming(self._room, self._device, self._outside.beside)
            except torch.OutOfMemoryError:
                return
        earlier = _alive(self._earlier)
        if earlier is not None:
            earlier.come(ahead - 1)

    def wanted(self, times: int) -> None:
        """So many tensors more, or fewer, that lie in it will be asked for: until the last it stays when it is back."""
        self._wanted += times
        if not self._wanted:
            self._back = None

    def numbers(self) -> Tensor:
        """Its bytes, where the device computes."""
        if not self._outside.apart:
            return self._room
        found, coming = self._back, self._coming
        if found is None:
            found = (coming or Coming(self._room, self._device, self._outside.beside)).arrived()
        self._coming, self._back = None, found if self._wanted else None
        earlier = _alive(self._earlier)
        if earlier is not None:
            earlier.come(AHEAD)
        return found


def _alive(reference: weakref.ref[T] | None) -> T | None:
    return None if reference is None else reference()


class Went:
    """A saved tensor whose memory has gone outside."""

    def __init__(self, tensor: Tensor, memory: Memory) -> None:
        self._memory, self._form = memory, Form(tensor)
        self._version, self._tensor = version(tensor), weakref.ref(tensor)
        self._unasked = True
        memory.wanted(1)

    def unpacked(self) -> Tensor:
        tensor = self._tensor()
        if tensor is not None:
            _compare(tensor, self._version)
        self._asked()
        return self._form.of(self._memory.numbers())

    def _asked(self) -> None:
        if self._unasked:
            self._unasked = False
            self._memory.wanted(-1)

    def __del__(self) -> None:
        self._asked()


def _compare(tensor: Tensor, saved: int) -> None:
    now = version(tensor)
    if now != saved:
        raise TaskError(
            "one of the tensors that backward needs was modified in place after it was saved: "
            f"{str(tensor.dtype).removeprefix('torch.')} of {tuple(tensor.shape)} is at version {now}, and was at "
            f"{saved}. Write x = x + y and not x += y there, or clone it before"
        )


class Leaving:
    """Tensors whose memory is on its way out, and cannot be made anew before it has arrived."""

    def __init__(self, outside: Outside) -> None:
        self._outside, self._tensors = outside, deque[tuple[Tensor, int, Any]]()

    def add(self, tensor: Tensor, memory: Memory) -> None:
        """One more; for the oldest the device waits."""
        if self._outside.apart:
            self._tensors.append((tensor, version(tensor), memory.mark))
            self.settle(AHEAD)

    def settle(self, left: int = 0) -> None:
        """The device waits until no more than ``left`` are on their way."""
        while len(self._tensors) > left:
            tensor, saved, mark = self._tensors.popleft()
            self._outside.beside.wait(mark)
            _compare(tensor, saved)  # else half of it might have gone before the write


Known = tuple["weakref.ref[UntypedStorage]", int, "weakref.ref[Memory]"]
"""A memory that went outside: itself, its version then, and what became of it."""


class SavedOutside:
    """Takes what forward passes save outside.

    Args:
        device_type: Of the tensors that go.
    """

    def __init__(self, outside: Outside, device_type: str) -> None:
        self.nbytes = 0
        """That went outside, in all passes."""
        self._outside, self._type = outside, device_type
        self._leaving = Leaving(outside)
        self._known: dict[int, Known] = {}
        self._last: weakref.ref[Memory] | None = None
        self._fake: Any = None

    @contextmanager
    def passing(self, kept: Iterable[Tensor | None]) -> Iterator[None]:
        """Around a forward pass.

        Args:
            kept: What somebody else holds.
        """
        stays = {
            address(tensor.untyped_storage()) for tensor in kept if tensor is not None and is_plain(tensor)
        }
        self._fake, self._known = active_fake_mode(), {}
        with saved_tensors_hooks(partial(self._pack, stays), self._unpack):
            yield

    def _pack(self, stays: set[int], tensor: Tensor) -> Stays | Went:
        if not self._goes(tensor, stays):
            return Stays(tensor)
        memory = self._gone(tensor)
        return Went(tensor, memory)

    def _goes(self, tensor: Tensor, stays: set[int]) -> bool:
        return (
            tensor.device.type == self._type
            and active_fake_mode() is self._fake
            and is_plain(tensor)
            and not any(_is_weight(each) for each in (tensor, base_of(tensor)))
            and tensor.untyped_storage().nbytes() >= SMALLEST
            and address(tensor.untyped_storage()) not in stays
        )

    def _gone(self, tensor: Tensor) -> Memory:
        """The memory of a tensor, which may have gone before."""
        storage = tensor.untyped_storage()
        known = self._known.get(address(storage))
        if known is not None and known[0]() is storage and known[1] == version(tensor):
            memory = known[2]()
            if memory is not None:
                return memory
        memory = Memory(tensor, self._outside, _alive(self._last))
        self._last = weakref.ref(memory)
        self._known[address(storage)] = weakref.ref(storage), version(tensor), self._last
        self.nbytes += storage.nbytes()
        self._leaving.add(tensor.detach(), memory)
        return memory

    def _unpack(self, packed: Stays | Went) -> Tensor:
        self._leaving.settle()
        return packed.unpacked()


def _is_weight(tensor: Tensor | None) -> bool:
    """A parameter, or whatever else has come from outside of the graph and gets a gradient."""
    return tensor is not None and (
        isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
    )


class Forward:
    """In the place of the ``forward`` of a model."""

    def __init__(self, saved: SavedOutside, model: nn.Module) -> None:
        self._saved, self._model, self.inner = saved, model, model.forward
        self._unchecked = True
        self.called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model
        if not (torch.is_grad_enabled() and model.training):
            return self.inner(*args, **kwargs)
        self.called = True
        given: list[Tensor] = []
        map_leaves(lambda leaf: given.append(leaf) if isinstance(leaf, Tensor) else None, (args, kwargs))
        with self._saved.passing([*given, *model.parameters(), *model.buffers()]):
            return self.inner(*args, **kwargs)

    def __reduce__(self) -> Any:
        """A copy of the model saves as any model does."""
        return _same, (self.inner,)

    def check(self, gather: Callable[[bool], list[bool]]) -> None:
        """After the first step: that nothing goes outside would be said by nobody.

        Args:
            gather: Brings together what all ranks tell; a collective call.

        Raises:
            ConfigurationError: If no rank has called the model.
        """
        if self._unchecked and not any(gather(self.called)):
            raise ConfigurationError(
                "offload activations: no rank has called the model in a step, so that nothing is kept outside: "
                "Task.forward uses its parts. Let it call the model, or leave activations out"
            )
        self._unchecked = False


def _same(forward: Any) -> Any:
    return forward
