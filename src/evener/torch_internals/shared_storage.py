"""Memory of a tensor that other processes can open, and whether it is still there: ``UntypedStorage._share_fd_cpu_``
and ``_expired``.

It moves what a storage holds into a file without a name, in place: all views of the storage, those of C++ too, are
there afterwards. The file lies in ``/dev/shm``, and belongs to the storage: its descriptor is open for as long as the
storage lives. The public ``share_memory_`` does the same, but does not tell the descriptor.

A reference that does not keep a storage keeps its address from being another's.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from torch import UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef as _Reference

DIRECTORY = "/dev/shm"


def shared_file(storage: UntypedStorage) -> tuple[int, int]:
    """The descriptor of the file in which ``storage`` of a CPU lies from now on, and its length in bytes.

    The length of the file is set and its memory taken as it is written: where ``/dev/shm`` is full, that ends the
    process (SIGBUS).
    """
    descriptor, nbytes, *_ = storage._share_fd_cpu_()
    return int(descriptor), int(nbytes)


class StorageWeakRef:
    """Of a storage, which it does not keep."""

    def __init__(self, storage: UntypedStorage) -> None:
        self._reference = _Reference(storage)  # type: ignore[no-untyped-call]

    def expired(self) -> bool:
        """Whether the storage is gone."""
        return bool(self._reference.expired())  # type: ignore[no-untyped-call]
