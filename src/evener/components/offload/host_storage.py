"""The memory outside: pinned memory of the host, or files that are mapped into memory.

A file is nobody's but this process's: it has no name from the moment when it is made, so that a process that is killed
leaves nothing, and its room on the disk is reserved at once, so that a full disk is an error here and not a signal in
the midst of a computation. What was written and is not needed at the moment is taken out of the process's own memory
(``MADV_DONTNEED`` of a shared mapping, which loses nothing); the operating system writes it to the disk when it wants
the memory.

A room goes back to the pool when the last tensor in it has gone, whoever had it, so that an error in the midst of a
step leaves no room behind.
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
from evener.core.os_errors import in_words
from evener.errors import ConfigurationError
from evener.hardware.memory import made_as
from evener.hardware.memory.counters import UNCOUNTED
from evener.torch_internals.storages import address

_PAGE = mmap.PAGESIZE
_ZEROS = 2**20


class Rooms(Protocol):
    """A kind of memory."""

    words: str
    """Where it is, for people."""

    def make(self, nbytes: int) -> Any:
        """A room of so many bytes."""

    def tensor(self, room: Any) -> Tensor:
        """Its bytes, as a tensor with a storage of its own."""

    def rest(self, room: Any) -> None:
        """What was written there will not be needed for a while."""


class Files:
    """Mapped files without names in a directory.

    Raises:
        StorageError: From :meth:`make`, if there is no room, or no file can be made.
    """

    def __init__(self, directory: Path) -> None:
        self.words, self._directory = f"files in {directory}", directory

    def make(self, nbytes: int) -> mmap.mmap:
        with in_words("offload"), tempfile.TemporaryFile(dir=self._directory) as file:
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
    """A file of so many bytes, all of which there are."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
        return
    for start in range(0, nbytes, _ZEROS):
        os.write(descriptor, bytes(min(_ZEROS, nbytes - start)))


class Pinned:
    """Memory of the host from which a GPU reads by itself. PyTorch takes the next power of two for each room."""

    words = "the host's memory"

    def make(self, nbytes: int) -> Any:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()

    def tensor(self, room: Any) -> Tensor:
        return torch.frombuffer(room, dtype=torch.uint8)

    def rest(self, room: Any) -> None:
        """It stays where it is."""


class Pretended:
    """Rooms that nobody has, for an estimate."""

    words = "nowhere"

    def make(self, nbytes: int) -> int:
        return nbytes

    def tensor(self, room: int) -> Tensor:
        with made_as(UNCOUNTED):
            return torch.empty(room, dtype=torch.uint8, device="cpu")

    def rest(self, room: int) -> None:
        """It is not there."""


class Outside:
    """Memory outside of a device.

    Args:
        apart: Whether the device cannot compute with it, so that what is outside has to come back.
    """

    def __init__(self, rooms: Rooms, beside: Beside, apart: bool) -> None:
        self.beside, self.apart = beside, apart
        self._rooms = rooms
        self._pool = Pool[Any](rooms.make)
        self._there: dict[int, Any] = {}  # rooms, by the addresses of the storages of tensors in them

    @property
    def words(self) -> str:
        """Where it is, for people."""
        return self._rooms.words

    @property
    def peak(self) -> int:
        """The most bytes that were taken at once."""
        return self._pool.peak

    def take(self, nbytes: int) -> Tensor:
        """At least so many bytes, until the last tensor that shares their memory has gone.

        Raises:
            StorageError: If there is no room for them.
        """
        room, size = self._pool.take(-(-nbytes // _PAGE) * _PAGE)
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
        """Keeps no room that nobody uses; what is in others stays there."""
        self._pool.close()

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor lies outside."""
        return address(tensor.untyped_storage()) in self._there

    def rest(self, tensor: Tensor) -> None:
        """What was written to the room of a tensor will not be needed for a while."""
        self._rooms.rest(self._there[address(tensor.untyped_storage())])


def check_outside(kind: str, asked: Offload) -> None:
    """Whether there is an outside for ranks on a kind of device of this machine.

    Raises:
        ConfigurationError: If there is none.
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
"""By type of device."""


def outside_of(device: torch.device, asked: Offload) -> Outside:
    """The memory outside of a device, as the settings want it."""
    return OUTSIDES[device.type](device, asked)


def pretended(kind: str) -> Callable[[torch.device, Offload], Outside]:
    """For an estimate of ranks on a kind of device, in place of what is real."""

    def made(device: torch.device, asked: Offload) -> Outside:
        if asked.directory is None:
            check_outside(kind, asked)
        return Outside(Pretended(), AtOnce(), apart=kind != "cpu")

    return made
