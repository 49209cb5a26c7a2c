"""Private names of storages: their identity, changes of their size, their end, and their sharing between processes.

- ``UntypedStorage._cdata`` is the address of a storage in C++. It identifies the storage that two tensors share; Python
  objects of a storage are the same only while somebody holds the object.
- ``torch._C._storage_Use_Count`` counts who holds a storage, in Python and in C++: tensors, and its Python object. A
  CUDA graph writes to the same memory again and again, and must know if somebody has kept it.
- ``UntypedStorage.resize_`` is public, but modes do not see it. FSDP2 frees and allocates memory with it. So it is
  wrapped while there is a listener.
- ``UntypedStorage._share_fd_cpu_`` moves the contents of a storage in place into a file without a name. All views of
  the storage, also those in C++, use the file afterwards. The file is in ``/dev/shm`` and belongs to the storage: its
  descriptor stays open while the storage lives. The public ``share_memory_`` does the same, but does not return the
  descriptor.
- ``StorageWeakRef`` does not keep a storage alive, but keeps its address from being used again. Its method ``expired``
  tells if the storage is gone. Its module has no documentation.
- ``Tensor._values`` and ``_indices`` return the stored parts of a sparse tensor. The public ``values`` needs a
  coalesced
  tensor, and coalescing sorts all indices, which is not needed to look at the values. torch's page on sparse tensors
  names the method for that.

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
"""The directory of the files of :func:`shared_file`."""

address: Callable[[UntypedStorage], int] = attrgetter("_cdata")
"""Returns a number that identifies a storage while it lives. Another storage may have it later."""

use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""Returns how many tensors and other objects hold the storage with that :func:`address`, which must live."""

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
    """Calls ``tell`` with every storage that is resized during the block."""
    _listeners.append(tell)
    UntypedStorage.resize_ = _resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        _listeners.remove(tell)
        if not _listeners:
            UntypedStorage.resize_ = _original  # type: ignore[method-assign]


def memory_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the dense tensors that hold a tensor's data: itself, or the parts of a sparse or wrapping tensor."""
    if wraps(type(tensor)):
        inner = parts_of(tensor).values()
        return tuple(part for each in inner if isinstance(each, Tensor) for part in memory_of(each))
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), stored_values(tensor)
    if tensor.layout is torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return (tensor,) if tensor.layout is torch.strided else ()


def stored_values(sparse: Tensor) -> Tensor:
    """Returns the stored values of a COO tensor. Several values may belong to one index."""
    return sparse._values()


def shared_file(storage: UntypedStorage) -> tuple[int, int]:
    """Moves a CPU storage into a shared file. Returns the file's descriptor and its length in bytes.

    The file system allocates memory only as the file is written. If ``/dev/shm`` is full, the write ends the process
    (SIGBUS).
    """
    descriptor, nbytes, *_ = storage._share_fd_cpu_()
    return int(descriptor), int(nbytes)


class StorageWeakRef:
    """A weak reference to a storage."""

    def __init__(self, storage: UntypedStorage) -> None:
        self._reference = _Reference(storage)  # type: ignore[no-untyped-call]

    def expired(self) -> bool:
        """Returns True if the storage is gone."""
        return bool(self._reference.expired())  # type: ignore[no-untyped-call]
