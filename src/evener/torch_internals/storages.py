"""Which storage is which, and when one changes its size: ``UntypedStorage._cdata`` and ``resize_``.

Two tensors that share memory share a storage, which Python sees as one object only while somebody keeps that object;
its address in C++ is what tells. No mode is told of ``resize_``, by which FSDP2 gives memory back and takes it anew, so
that it is wrapped while somebody listens.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from evener.torch_internals.dispatch_mode import wraps

address: Callable[[UntypedStorage], int] = attrgetter("_cdata")
"""The same for as long as the storage lives, and for no other one meanwhile."""

Resized = Callable[[UntypedStorage], None]
_listeners: list[Resized] = []
_original = UntypedStorage.resize_


def _resize_(storage: UntypedStorage, size: int) -> Any:
    found = _original(storage, size)
    for tell in tuple(_listeners):
        tell(storage)
    return found


@contextmanager
def resizing_told(tell: Resized) -> Iterator[None]:
    """``tell`` is called with every storage that gets another size in the block."""
    _listeners.append(tell)
    UntypedStorage.resize_ = _resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        _listeners.remove(tell)
        if not _listeners:
            UntypedStorage.resize_ = _original  # type: ignore[method-assign]


def memory_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors in which the numbers of one lie: itself, or those that a sparse or wrapping one has."""
    if wraps(type(tensor)):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = (getattr(tensor, name) for name in names)  # of a DTensor the mesh too
        return tuple(part for each in inner if isinstance(each, Tensor) for part in memory_of(each))
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout is torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return (tensor,) if tensor.layout is torch.strided else ()
