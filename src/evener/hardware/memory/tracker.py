"""Counts every storage that operators make, once, from when it is made until it is freed.

A mode of PyTorch's dispatcher sees each operator below autograd, with what autograd saved for backward alive and what
it did not save gone, on real tensors and on fake ones, which have no memory, alike. It is thread local, and autograd
takes it along to the threads in which a GPU's backward runs, as it does with all modes.

``torch.distributed._tools.mem_tracker.MemTracker`` works so too, and was tried first: it counts the same bytes to the
last (an MLP, a ResNet and a transformer with AdamW). But it has no limit, cannot tell what is a bucket, and follows
modules by hooks: a module that is called twice before its numbers are reset, as with micro-batches, is an error there,
and the stages of a pipeline call few modules as such. It is a private name besides.

Not seen: what an operator allocates inside for itself and frees again (oneDNN's scratch on a CPU, workspaces of cuBLAS
and cuDNN), what a library allocates without PyTorch, and fragmentation.
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
from evener.hardware.memory.counters import ACTIVATIONS, BUCKETS, CATEGORIES, OTHER, UNCOUNTED, Held, Tally
from evener.hardware.memory.purpose import purpose
from evener.torch_internals.dispatch_mode import DispatchMode, in_backward, makes_memory, may_resize, wraps
from evener.torch_internals.fake_tensors import active_fake_mode
from evener.torch_internals.storages import address, memory_of, resizing_told

CUDA_BLOCK = 512
"""Bytes: every block of PyTorch's caching allocators is a multiple (``kMinBlockSize`` in c10/cuda and c10/xpu)."""
_BLOCKS = {"cuda": CUDA_BLOCK, "xpu": CUDA_BLOCK}
_SENDING = ("_c10d_functional", "_c10d_functional_autograd", "fsdp")
"""Operators of these libraries make what is sent or received."""


def rounded(nbytes: int, device_type: str) -> int:
    """What the allocator of a kind of device takes for ``nbytes``."""
    block = _BLOCKS.get(device_type, 1)
    return -(-nbytes // block) * block


class MemoryLimitError(EvenerError, torch.OutOfMemoryError):
    """An allocation above the limit; whatever catches a GPU's being out of memory catches this."""


class Accounting(DispatchMode):
    """Counts the tensors of a device that are made in the block::

        with Accounting(limit=2 * 2**30) as account:
            account.name("parameters", model.parameters())
            loss(model(inputs)).backward()
        account.peak, account.at_peak()["activations"]

    What was there before is not known to it until it is named.

    Args:
        limit: In bytes; None is none. It may be changed at any time.
        device_type: Whose tensors count. Fake tensors are of the device that they pretend to be on.
        rounding: By whose allocator sizes are rounded, if by another's.
    """

    def __init__(
        self, limit: int | None = None, device_type: str = "cpu", rounding: str | None = None
    ) -> None:
        super().__init__()
        self.limit = limit
        self._type, self._round = device_type, partial(rounded, device_type=rounding or device_type)
        self._tally = Tally()
        self._known: dict[int, tuple[Held, weakref.ref[UntypedStorage]]] = {}  # by address of storage
        self._fake: Any = None
        self._undo = ExitStack()

    # What was counted

    @property
    def held(self) -> int:
        """Bytes that are held."""
        return self._tally.held

    @property
    def peak(self) -> int:
        """The most bytes that were held at once since :meth:`reset_peak`."""
        return self._tally.peak

    def by_category(self) -> dict[str, int]:
        """Bytes that are held, by all of ``CATEGORIES``."""
        return self._tally.now()

    def at_peak(self) -> dict[str, int]:
        """Bytes that were held at the peak, by what they were found to be for up to now."""
        return self._tally.at_peak()

    def reset_peak(self) -> None:
        """The peak is what is held now."""
        self._tally.reset_peak()

    # What is for what

    def name(self, category: str, tensors: Iterable[Tensor | None]) -> None:
        """Says what tensors are for, whenever they were made; those that were not known are known from now on.

        Raises:
            ValueError: If there is no such category.
            MemoryLimitError: If those that were not known are beyond the limit.
        """
        if category not in CATEGORIES:
            raise ValueError(f"there is no category {category!r}; there are {', '.join(CATEGORIES)}")
        for tensor in tensors:
            for part in () if tensor is None else memory_of(tensor):
                held = self._meet(part, "what is given", category)
                if held is not None:
                    held.category = category

    # The mode

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
            return NotImplemented  # a DTensor or the like becomes operators on plain tensors first
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

    def _meet(self, tensor: Tensor, function: Any, category: str | None = None) -> Held | None:
        """What is held for a tensor, which may be new; None if it is none of the device's."""
        storage = tensor.untyped_storage()
        place = address(storage)
        known = self._known.get(place)
        if known is None:
            if tensor.device.type != self._type:
                return None
            category = category or self._category(function)
            if category is UNCOUNTED or active_fake_mode() is not self._fake:
                return None  # nothing new, or a shape that PyTorch only works out
            return self._take(storage, category, function)
        if self._round(storage.nbytes()) != known[0].nbytes:
            self._resized(storage)
            known = self._known[place]
        return known[0]

    def _category(self, function: Any) -> str:
        namespace = getattr(function, "namespace", "")
        if namespace == "c10d" or not makes_memory(function):
            return UNCOUNTED  # a view of what was there before, or something written into it
        if namespace in _SENDING:
            return BUCKETS
        said = purpose()
        if said is not None:
            return said
        return OTHER if in_backward() and not torch.is_grad_enabled() else ACTIVATIONS

    def _take(self, storage: UntypedStorage, category: str, function: Any) -> Held:
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
        """Memory that is given back and taken anew is FSDP2's, into which weights are gathered."""
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
