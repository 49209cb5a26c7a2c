"""Offloads the tensors that forward passes save for backward.

::

    forward     save a ─ save b ─ save c        out: as soon as a tensor is saved
    outside         a       b       c
    backward    c ─ b ─ a                       back: each while the tensor saved after it is used

Autograd calls hooks for each tensor that it saves (``torch.autograd.graph.saved_tensors_hooks``). Whole storages are
offloaded, not tensors: a tensor that is saved twice, or two views of one storage, are copied once, and share memory
again when they return. Weights, buffers and the model's inputs are not offloaded, because others keep them alive. Small
storages are not offloaded either.

Autograd does not check the versions of tensors that hooks have saved, so that this module does. Changing a saved tensor
in place raises an error, as it does without offload.
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
from evener.components.offload.layout import TensorLayout, bytes_of, is_plain
from evener.data.batch import tensors_in
from evener.errors import ConfigurationError, TaskError
from evener.hardware.memory import made_as
from evener.hardware.memory.counters import ACTIVATIONS
from evener.torch_internals.autograd import base_of, version
from evener.torch_internals.dispatch import active_fake_mode
from evener.torch_internals.storages import address

T = TypeVar("T")

SMALLEST = 2**20
"""Minimum size in bytes of a storage that is offloaded."""
AHEAD = 2
"""How many storages are loaded ahead of use, and how many may be in transit to the host."""


class KeptTensor:
    """A saved tensor that stays on the device."""

    def __init__(self, tensor: Tensor) -> None:
        # An output that its own operation saves would be a reference cycle.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = version(tensor)

    def unpacked(self) -> Tensor:
        _compare(self._tensor, self._version)
        return self._tensor


class PendingLoad:
    """A copy from the host to the device in progress."""

    def __init__(self, room: Tensor, device: torch.device, beside: Beside) -> None:
        with made_as(ACTIVATIONS):
            self._there = torch.empty(room.numel(), dtype=torch.uint8, device=device)
        self._beside, self._arrived = beside, False
        with beside.lane():
            self._there.copy_(room, non_blocking=True)
            self._mark = beside.mark()

    def arrived(self) -> Tensor:
        """Returns the copy, for computation that is queued from now on."""
        if not self._arrived:
            self._beside.wait(self._mark)
            self._arrived = True
        return self._there

    def __del__(self) -> None:
        with suppress(AttributeError):  # if the allocation failed
            self.arrived()  # otherwise the copy could overwrite a new tensor in this memory


class Memory:
    """A storage that has been offloaded.

    Args:
        tensor: A tensor in the storage.
        earlier: The storage that was offloaded before this one. Backward needs it after this one.
    """

    def __init__(self, tensor: Tensor, outside: Outside, earlier: Memory | None) -> None:
        numbers = bytes_of(tensor)
        self._outside, self._device = outside, tensor.device
        self._room = outside.allocate(numbers.numel())[: numbers.numel()]
        self._earlier = None if earlier is None else weakref.ref(earlier)
        self._coming: PendingLoad | None = None
        self._back: Tensor | None = None
        self._wanted = 0
        if outside.apart:
            with outside.beside.lane():
                self._room.copy_(numbers, non_blocking=True)
                self.mark = outside.beside.mark()
        else:
            self._room.copy_(numbers)
        outside.rest(self._room)

    def start_loading(self, ahead: int) -> None:
        """Starts to load up to ``ahead`` storages, if the device has memory for them: this one, and those offloaded
        before it."""
        if not ahead or not self._outside.apart:
            return
        if self._coming is None and self._back is None:
            try:
                self._coming = PendingLoad(self._room, self._device, self._outside.beside)
            except torch.OutOfMemoryError:
                return
        earlier = _alive(self._earlier)
        if earlier is not None:
            earlier.start_loading(ahead - 1)

    def wanted(self, times: int) -> None:
        """Changes the number of tensors in this storage that backward still needs. A loaded storage stays on the device
        until the number is 0."""
        self._wanted += times
        if not self._wanted:
            self._back = None

    def numbers(self) -> Tensor:
        """Returns the bytes of the storage where the device can compute with them, and starts to load the storages that
        are needed next."""
        if not self._outside.apart:
            return self._room
        found, coming = self._back, self._coming
        if found is None:
            found = (coming or PendingLoad(self._room, self._device, self._outside.beside)).arrived()
        self._coming, self._back = None, found if self._wanted else None
        earlier = _alive(self._earlier)
        if earlier is not None:
            earlier.start_loading(AHEAD)
        return found


def _alive(reference: weakref.ref[T] | None) -> T | None:
    return None if reference is None else reference()


class OffloadedTensor:
    """A saved tensor whose storage has been offloaded."""

    def __init__(self, tensor: Tensor, memory: Memory) -> None:
        self._memory, self._form = memory, TensorLayout(tensor)
        self._version, self._tensor = version(tensor), weakref.ref(tensor)
        self._unasked = True
        memory.wanted(1)

    def unpacked(self) -> Tensor:
        tensor = self._tensor()
        if tensor is not None:
            _compare(tensor, self._version)
        self._asked()
        return self._form.view_on(self._memory.numbers())

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


class PendingStores:
    """Tensors whose storages are being copied to the host. Their memory must not be reused before the copies end."""

    def __init__(self, outside: Outside) -> None:
        self._outside, self._tensors = outside, deque[tuple[Tensor, int, Any]]()

    def add(self, tensor: Tensor, memory: Memory) -> None:
        """Adds a tensor. With more than ``AHEAD`` copies in progress, the device waits for the oldest."""
        if self._outside.apart:
            self._tensors.append((tensor, version(tensor), memory.mark))
            self.settle(AHEAD)

    def settle(self, left: int = 0) -> None:
        """Makes the device wait until at most ``left`` copies are in progress."""
        while len(self._tensors) > left:
            tensor, saved, mark = self._tensors.popleft()
            self._outside.beside.wait(mark)
            _compare(tensor, saved)  # a write during the copy would be copied in part


Known = tuple["weakref.ref[UntypedStorage]", int, "weakref.ref[Memory]"]
"""An offloaded storage: a weak reference to it, its version when it was offloaded, and its host copy."""


class SavedOutside:
    """Offloads the tensors that forward passes save.

    Args:
        device_type: The type of device whose tensors are offloaded.
    """

    def __init__(self, outside: Outside, device_type: str) -> None:
        self.nbytes = 0
        """Bytes that were offloaded in all passes."""
        self._outside, self._type = outside, device_type
        self._leaving = PendingStores(outside)
        self._known: dict[int, Known] = {}
        self._last: weakref.ref[Memory] | None = None
        self._fake: Any = None

    @contextmanager
    def passing(self, kept: Iterable[Tensor | None]) -> Iterator[None]:
        """Context for a forward pass.

        Args:
            kept: Tensors that others keep alive, and that are not offloaded.
        """
        stays = {
            address(tensor.untyped_storage()) for tensor in kept if tensor is not None and is_plain(tensor)
        }
        self._fake, self._known = active_fake_mode(), {}
        with saved_tensors_hooks(partial(self._pack, stays), self._unpack):
            yield

    def _pack(self, stays: set[int], tensor: Tensor) -> KeptTensor | OffloadedTensor:
        if not self._goes(tensor, stays):
            return KeptTensor(tensor)
        memory = self._gone(tensor)
        return OffloadedTensor(tensor, memory)

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
        """Returns the offloaded storage of a tensor. Offloads it if that has not happened yet."""
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

    def _unpack(self, packed: KeptTensor | OffloadedTensor) -> Tensor:
        self._leaving.settle()
        return packed.unpacked()


def _is_weight(tensor: Tensor | None) -> bool:
    """Returns True for a parameter, or any other leaf tensor that gets a gradient."""
    return tensor is not None and (
        isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
    )


class OffloadedForward:
    """Replaces the ``forward`` of a model. Offloads saved activations in training."""

    def __init__(self, saved: SavedOutside, model: nn.Module) -> None:
        self._saved, self._model, self.inner = saved, model, model.forward
        self.called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model
        if not (torch.is_grad_enabled() and model.training):
            return self.inner(*args, **kwargs)
        self.called = True
        given = tensors_in((args, kwargs))
        with self._saved.passing([*given, *model.parameters(), *model.buffers()]):
            return self.inner(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Makes a copy of the model use the plain ``forward``."""
        return _same, (self.inner,)

    def check(self, gather: Callable[[bool], list[bool]]) -> None:
        """Checks after the first step that the model was called: otherwise nothing is offloaded, without an error.

        Args:
            gather: Gathers a value of every rank; a collective call.

        Raises:
            ConfigurationError: If no rank has called the model.
        """
        if not any(gather(self.called)):
            raise ConfigurationError(
                "offload activations: no rank has called the model in a step, so that nothing is kept outside: "
                "Task.forward uses its parts. Let it call the model, or leave activations out"
            )


def _same(forward: Any) -> Any:
    return forward
