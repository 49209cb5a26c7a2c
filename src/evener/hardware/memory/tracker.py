"""Counts each storage that operators allocate, from its allocation until it is freed.

A PyTorch dispatch mode sees each operator below autograd, when tensors that autograd saved for backward are alive and
others are freed. It works for real tensors and for fake ones, which have no memory. The mode is thread-local; autograd
passes it on to the threads in which a GPU's backward runs, as it does with all modes.

``torch.distributed._tools.mem_tracker.MemTracker`` uses the same method and counts exactly the same bytes (tested with
an MLP, a ResNet and a transformer with AdamW). But it has no limit, cannot identify buckets, and tracks modules by
hooks: it raises an error if a module is called twice before its statistics are reset, as with micro-batches, and
pipeline stages call few modules directly. It is also a private API.

Not counted: memory that an operator allocates and frees internally (oneDNN's scratch memory on a CPU, workspaces of
cuBLAS and cuDNN), memory that libraries allocate without PyTorch, and fragmentation.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, UntypedStorage

from evener.errors import EvenerError
from evener.hardware.memory.counters import (
    ACTIVATIONS,
    BUCKETS,
    CATEGORIES,
    OTHER,
    UNCOUNTED,
    ByteCounter,
    HeldBytes,
)
from evener.hardware.memory.purpose import purpose
from evener.torch_internals.dispatch import (
    DispatchMode,
    active_fake_mode,
    in_backward,
    makes_memory,
    may_resize,
    wraps,
)
from evener.torch_internals.storages import address, memory_of, resizing_told

CUDA_BLOCK = 512
"""Allocation granularity of PyTorch's caching allocators, in bytes (``kMinBlockSize`` in c10/cuda and c10/xpu)."""
_BLOCKS = {"cuda": CUDA_BLOCK, "xpu": CUDA_BLOCK}
_SENDING = ("_c10d_functional", "_c10d_functional_autograd", "fsdp")
"""Libraries whose operators allocate communication buffers."""


def rounded(nbytes: int, device_type: str) -> int:
    """Rounds ``nbytes`` up to what the allocator of a device type uses for them."""
    block = _BLOCKS.get(device_type, 1)
    return -(-nbytes // block) * block


class MemoryLimitError(EvenerError, torch.OutOfMemoryError):
    """An allocation exceeds the limit. A subclass of ``torch.OutOfMemoryError``, so that the same handlers catch it."""


class MemoryTracker(DispatchMode):
    """Counts the tensors of a device type that are allocated in the block::

        with MemoryTracker(limit=2 * 2**30) as account:
            account.name("parameters", model.parameters())
            loss(model(inputs)).backward()
        account.peak, account.at_peak()["activations"]

    Tensors that were allocated before the block do not count until they are passed to :meth:`name`.

    Args:
        limit: Maximum bytes in use; None for no limit. It may be changed at any time.
        device_type: Device type of the tensors to count. Fake tensors count for the device that they pretend to be on.
        rounding: Device type whose allocator rounds the sizes, if it is not ``device_type``.
    """

    def __init__(
        self, limit: int | None = None, device_type: str = "cpu", rounding: str | None = None
    ) -> None:
        super().__init__()
        self.limit = limit
        self._type, self._round = device_type, partial(rounded, device_type=rounding or device_type)
        self._tally = ByteCounter()
        self._known: dict[int, tuple[HeldBytes, weakref.ref[UntypedStorage]]] = {}  # by address of storage
        self._fake: Any = None
        self._undo = ExitStack()

    # Counts

    @property
    def held(self) -> int:
        """Bytes in use now."""
        return self._tally.held

    @property
    def peak(self) -> int:
        """Maximum bytes in use since :meth:`reset_peak`."""
        return self._tally.peak

    def by_category(self) -> dict[str, int]:
        """Returns the bytes in use now for each of ``CATEGORIES``."""
        return self._tally.now()

    def at_peak(self) -> dict[str, int]:
        """Returns the bytes in use at the peak, by the categories that the allocations have now."""
        return self._tally.at_peak()

    def reset_peak(self) -> None:
        """Sets the peak to the bytes in use now."""
        self._tally.reset_peak()

    # Categories

    def name(self, category: str, tensors: Iterable[Tensor | None]) -> None:
        """Assigns tensors to a category. Tensors that were not counted so far count from now on.

        Raises:
            ValueError: If there is no such category.
            MemoryLimitError: If the tensors that were not counted so far exceed the limit.
        """
        if category not in CATEGORIES:
            raise ValueError(f"there is no category {category!r}; there are {', '.join(CATEGORIES)}")
        for tensor in tensors:
            for part in () if tensor is None else memory_of(tensor):
                held = self._meet(part, "what is given", category)
                if held is not None:
                    held.category = category

    # The dispatch mode

    def __enter__(self) -> Self:
        self._fake = active_fake_mode()
        self._undo.enter_context(resizing_told(self._resized))
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._undo.close()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(wraps, types)):
            return NotImplemented  # a wrapper such as DTensor calls operators on plain tensors next
        found = function(*args, **(kwargs or {}))
        if makes_memory(function) or may_resize(function):
            self._look(found, function)
        return found

    def _look(self, found: Any, function: Any) -> None:
        if isinstance(found, Tensor):
            if found.layout is torch.strided:
                self._meet(found, function)
            else:
                for part in memory_of(found):
                    self._meet(part, function)
        elif isinstance(found, tuple | list):
            for each in found:
                self._look(each, function)

    def _meet(self, tensor: Tensor, function: Any, category: str | None = None) -> HeldBytes | None:
        """Returns the allocation of a tensor, and adds it if it is new. Returns None if the tensor does not count."""
        storage = tensor.untyped_storage()
        place = address(storage)
        known = self._known.get(place)
        if known is None:
            if tensor.device.type != self._type:
                return None
            category = category or self._category(function)
            if category is UNCOUNTED or active_fake_mode() is not self._fake:
                return None  # no new memory, or a fake tensor with which PyTorch only infers a shape
            return self._take(storage, category, function)
        if self._round(storage.nbytes()) != known[0].nbytes:
            self._resized(storage)
            known = self._known[place]
        return known[0]

    def _category(self, function: Any) -> str:
        namespace = getattr(function, "namespace", "")
        if namespace == "c10d" or not makes_memory(function):
            return UNCOUNTED  # a view of an existing tensor, or an operator that writes into one
        if namespace in _SENDING:
            return BUCKETS
        said = purpose()
        if said is not None:
            return said
        return OTHER if in_backward() and not torch.is_grad_enabled() else ACTIVATIONS

    def _take(self, storage: UntypedStorage, category: str, function: Any) -> HeldBytes:
        size, place = self._round(storage.nbytes()), address(storage)
        if self.limit is not None and size and self.held + size > self.limit:
            raise MemoryLimitError(
                f"out of memory: {function} asks for {size} bytes, {self.held} are held, and the limit is {self.limit}"
                ": use a smaller micro_batch, a strategy that divides the model, or a higher limit"
            )
        held = self._tally.add(size, category)
        self._known[place] = held, weakref.ref(storage, partial(self._freed, place))
        return held

    def _freed(self, place: int, reference: weakref.ref[UntypedStorage]) -> None:
        known = self._known.get(place)
        if known is not None and known[1] is reference:
            del self._known[place]
            self._tally.remove(known[0])

    def _resized(self, storage: UntypedStorage) -> None:
        """Updates the size of a storage that was resized.

        A storage that is resized to 0 is a buffer of FSDP2, into which weights are gathered: it counts as a bucket.
        """
        known = self._known.get(address(storage))
        size = self._round(storage.nbytes())
        if known is None or known[0].nbytes == size:
            return
        was = known[0]
        if was.category in (ACTIVATIONS, OTHER) and size == 0:
            was.category = BUCKETS
        del self._known[address(storage)]
        self._tally.remove(was)
        self._take(storage, was.category, "resize_")
