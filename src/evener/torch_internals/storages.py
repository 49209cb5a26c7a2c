"""Names of memory: which storage is which, when one changes its size or goes, and where others can open it.

- ``UntypedStorage._cdata`` is a storage's address in C++. Two tensors that share memory share a storage, which Python
  sees as one object only while somebody keeps that object; the address is what tells.
- ``UntypedStorage.resize_`` is public, but no mode is told of it. FSDP2 gives memory back by it and takes it anew, so
  that it is wrapped while somebody listens.
- ``UntypedStorage._share_fd_cpu_`` moves what a storage holds into a file without a name, in place: all views of the
  storage, those of C++ too, are there afterwards. The file lies in ``/dev/shm``, and belongs to the storage: its
  descriptor is open for as long as the storage lives. The public ``share_memory_`` does the same, but does not tell
  the descriptor.
- ``StorageWeakRef`` does not keep a storage, but keeps its address from being another's. It says by ``_expired``
  whether the storage is still there, and lies in a module that has no documentation.
- ``Tensor._values`` and ``_indices`` are what a sparse tensor stores, as it is stored. ``values`` wants a tensor that
  is coalesced, and to make one sorts all its indices, which a look at the numbers does not need. torch's page on
  sparse tensors names the method for that.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef as _Reference

from evener.torch_internals.dispatch import parts_of, wraps

DIRECTORY = "/dev/shm"
"""The directory of the files that :func:`shared_file` makes."""

address: Callable[[UntypedStorage], int] = attrgetter("_cdata")
"""Returns what is the same for as long as the storage lives, and for no other one meanwhile."""

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
    """Calls ``tell`` with every storage that gets another size in the block."""
    _listeners.append(tell)
    UntypedStorage.resize_ = _resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        _listeners.remove(tell)
        if not _listeners:
            UntypedStorage.resize_ = _original  # type: ignore[method-assign]


def memory_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the dense tensors in which the numbers of one lie: itself, or those that a sparse or wrapping one has."""
    if wraps(type(tensor)):
        inner = parts_of(tensor).values()
        return tuple(part for each in inner if isinstance(each, Tensor) for part in memory_of(each))
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), stored_values(tensor)
    if tensor.layout is torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return (tensor,) if tensor.layout is torch.strided else ()


def stored_values(sparse: Tensor) -> Tensor:
    """Returns the numbers of a COO tensor, of which several may have one place."""
    return sparse._values()


def shared_file(storage: UntypedStorage) -> tuple[int, int]:
    """Returns the descriptor of the file in which ``storage`` of a CPU lies from now on, and its length in bytes.

    The length of the file is set and its memory taken as it is written: where ``/dev/shm`` is full, that ends the
    process (SIGBUS).
    """
    descriptor, nbytes, *_ = storage._share_fd_cpu_()
    return int(descriptor), int(nbytes)


class StorageWeakRef:
    """A reference to a storage, which it does not keep."""

    def __init__(self, storage: UntypedStorage) -> None:
        self._reference = _Reference(storage)  # type: ignore[no-untyped-call]

    def expired(self) -> bool:
        """Tells whether the storage is gone."""
        return bool(self._reference.expired())  # type: ignore[no-untyped-call]
