"""Memory for offloaded tensors: pinned host memory, or memory-mapped files.

A file has no name from the moment it is created, so that a killed process leaves nothing behind. Its disk space is
reserved at once, so that a full disk raises an error here instead of a signal in the middle of a computation. Data that
is not needed for a while is removed from the process's memory (``MADV_DONTNEED`` on a shared mapping, which loses
nothing). The operating system writes it to disk when it needs the memory.

A buffer returns to the pool when the last tensor in it is gone, whoever held it. So an error in the middle of a step
leaks no buffers.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from evener.components.offload.copy_stream import AtOnce, Beside, OnStream
from evener.components.offload.pool import Pool
from evener.core.config.offload import Offload
from evener.core.os_errors import storage_errors
from evener.errors import ConfigurationError
from evener.hardware.memory import made_as
from evener.hardware.memory.counters import UNCOUNTED
from evener.torch_internals.storages import address

_PAGE = mmap.PAGESIZE
_ZEROS = 2**20


class HostBuffers(Protocol):
    """A kind of memory that provides buffers."""

    description: str
    """A description of the memory for users."""

    def make(self, nbytes: int) -> Any:
        """Allocates a buffer of ``nbytes`` bytes."""

    def tensor(self, room: Any) -> Tensor:
        """Returns the bytes of a buffer as a tensor with a storage of its own."""

    def rest(self, room: Any) -> None:
        """Tells that the buffer's content will not be needed for a while."""


class Files:
    """Memory-mapped files without names in a directory.

    Raises:
        StorageError: From :meth:`make`, if the disk is full, or no file can be created.
    """

    def __init__(self, directory: Path) -> None:
        self.description, self._directory = f"files in {directory}", directory

    def make(self, nbytes: int) -> mmap.mmap:
        with storage_errors("offload"), tempfile.TemporaryFile(dir=self._directory) as file:
            try:
                _reserve(file.fileno(), nbytes)
            except OSError as error:
                raise OSError(
                    error.errno, error.strerror, f"{nbytes:,} bytes in {self._directory}"
                ) from error
            return mmap.mmap(file.fileno(), nbytes)

    def tensor(self, room: mmap.mmap) -> Tensor:
        return torch.frombuffer(room, dtype=torch.uint8)

    def rest(self, room: mmap.mmap) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            room.madvise(mmap.MADV_DONTNEED)


def _reserve(descriptor: int, nbytes: int) -> None:
    """Gives the file ``nbytes`` bytes and reserves disk space for all of them."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
        return
    for start in range(0, nbytes, _ZEROS):
        os.write(descriptor, bytes(min(_ZEROS, nbytes - start)))


class Pinned:
    """Pinned host memory, which a GPU can access directly. PyTorch rounds each buffer up to a power of two."""

    description = "the host's memory"

    def make(self, nbytes: int) -> Any:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()

    def tensor(self, room: Any) -> Tensor:
        return torch.frombuffer(room, dtype=torch.uint8)

    def rest(self, room: Any) -> None:
        """Does nothing: pinned memory stays in memory."""


class Pretended:
    """Fake storage for a memory estimate: counts bytes, and its tensors are fake."""

    description = "nowhere"

    def make(self, nbytes: int) -> int:
        return nbytes

    def tensor(self, room: int) -> Tensor:
        with made_as(UNCOUNTED):
            return torch.empty(room, dtype=torch.uint8, device="cpu")

    def rest(self, room: int) -> None:
        """Does nothing: the storage is fake."""


class Outside:
    """Memory for offloaded tensors of one device.

    Args:
        rooms: Provides the buffers.
        beside: Runs the copies.
        apart: True if the device cannot compute with this memory, so that offloaded tensors must be copied back.
    """

    def __init__(self, rooms: HostBuffers, beside: Beside, apart: bool) -> None:
        self.beside, self.apart = beside, apart
        self._rooms = rooms
        self._pool = Pool[Any](rooms.make)
        self._there: dict[int, Any] = {}  # buffers, by the addresses of the storages in them

    @property
    def description(self) -> str:
        """A description of the memory for users."""
        return self._rooms.description

    @property
    def peak(self) -> int:
        """The peak number of bytes of all buffers together."""
        return self._pool.peak

    def allocate(self, nbytes: int) -> Tensor:
        """Returns a tensor of at least ``nbytes`` bytes. Its buffer stays in use until the last tensor that shares its
        storage is gone.

        Raises:
            StorageError: If there is no space.
        """
        room, size = self._pool.take_buffer(-(-nbytes // _PAGE) * _PAGE)
        tensor = self._rooms.tensor(room)
        storage = tensor.untyped_storage()
        place = address(storage)
        self._there[place] = room
        weakref.finalize(storage, self._left, place, room, size).atexit = False
        return tensor

    def _left(self, place: int, room: Any, size: int) -> None:
        del self._there[place]
        self._rooms.rest(room)
        self._pool.give_back(room, size)

    def close(self) -> None:
        """Frees all unused buffers. Buffers in use are freed when their last tensor is gone."""
        self._pool.close()

    def holds(self, tensor: Tensor) -> bool:
        """Returns True if the tensor is in this memory."""
        return address(tensor.untyped_storage()) in self._there

    def rest(self, tensor: Tensor) -> None:
        """Tells that the tensor's content will not be needed for a while."""
        self._rooms.rest(self._there[address(tensor.untyped_storage())])


def check_outside(kind: str, asked: Offload) -> None:
    """Checks that ranks on this kind of device can offload as requested.

    Raises:
        ConfigurationError: If they cannot.
    """
    directory = asked.directory
    if directory is None and kind == "cpu" and asked.kinds:
        raise ConfigurationError(
            f"offload {asked.words}: a rank on a CPU has everything in the memory of the host already. Name a "
            "directory on a disk with offload_to (--offload-to DIR), or leave offload out"
        )
    if directory is not None and not directory.is_dir():
        raise ConfigurationError(f"offload_to {directory} is no directory: make it, or name another")


def _of_host(device: torch.device, asked: Offload) -> Outside:
    check_outside(device.type, asked)
    assert asked.directory is not None
    return Outside(Files(asked.directory), AtOnce(), apart=False)


def _of_card(device: torch.device, asked: Offload) -> Outside:
    check_outside(device.type, asked)
    rooms = Pinned() if asked.directory is None else Files(asked.directory)
    return Outside(rooms, OnStream(device), apart=True)


OUTSIDES: dict[str, Callable[[torch.device, Offload], Outside]] = {"cpu": _of_host, "cuda": _of_card}
"""Creates the memory for offloaded tensors, by type of device."""


def outside_of(device: torch.device, asked: Offload) -> Outside:
    """Returns the memory for offloaded tensors of a device, as the settings request."""
    return OUTSIDES[device.type](device, asked)


def pretended(kind: str) -> Callable[[torch.device, Offload], Outside]:
    """Returns a replacement of an ``OUTSIDES`` entry with fake storage, to estimate the memory of ranks on this kind of
    device."""

    def made(device: torch.device, asked: Offload) -> Outside:
        if asked.directory is None:
            check_outside(kind, asked)
        return Outside(Pretended(), AtOnce(), apart=kind != "cpu")

    return made
