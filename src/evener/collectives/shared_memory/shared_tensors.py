"""Moves gradient buckets into shared memory that all ranks of a host map.

A tensor that is summed again and again is moved once to shared memory, its *home*, which the other ranks map. From then
on the ranks add and write sums there directly, and nothing is copied in or out::

    rank 0   bucket   a a a a b b b b          rank 0 adds the first half of both, rank 1 the second,
    rank 1   bucket   c c c c d d d d          each writes its sums into both

A tensor is not moved when it is summed for the first time, as DistributedDataParallel rebuilds its buckets after the
first step. It is moved the second time, if the ranks agree and ``/dev/shm`` has space; else it stays where it is.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from evener.distributed.hosts import all_gather
from evener.distributed.shm.slots import MOST_EXTRA
from evener.torch_internals.storages import DIRECTORY, StorageWeakRef, address, shared_file

STRANGE, WANTED = 1, 2
"""State of a tensor without a home. STRANGE: it is summed for the first time, or must not move. WANTED: it should get
a home."""
_FIRST = 3
_SPARE_NBYTES = 16 * 2**20
"""Bytes of ``/dev/shm`` that are left free for other uses."""

_Key = tuple[int, int, int, torch.dtype]


class Home(NamedTuple):
    """Shared memory of a tensor, one on every rank."""

    number: int
    """The home's number: the same on all ranks, and never reused."""
    flats: tuple[Tensor, ...]
    """The mapped tensors of all ranks, in order of rank; shape (elements,) each."""


class _Address(NamedTuple):
    """The address of a tensor for other processes: an open file of a process, and an offset."""

    pid: int
    descriptor: int
    file_nbytes: int
    offset_nbytes: int


class Homes:
    """Moves gradient buckets into shared memory. All ranks of the host must call :meth:`settle` together.

    Args:
        group: Ranks of one host that may open each other's files.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank = group, dist.get_rank(group)
        self._seen: dict[_Key, StorageWeakRef] = {}
        self._homes: dict[_Key, Home] = {}
        self._refused: set[_Key] = set()
        self._count = _FIRST

    @property
    def numbers(self) -> set[int]:
        """The numbers of all homes."""
        return {home.number for home in self._homes.values()}

    def home_number(self, tensor: Tensor) -> int:
        """Returns the number of the tensor's home, ``WANTED`` or ``STRANGE``. Records the tensor: it is ``STRANGE`` in
        the first call and ``WANTED`` in later ones."""
        key = _key(tensor)
        if key in self._homes:
            return self._homes[key].number
        if key in self._refused or self._count > MOST_EXTRA:
            return STRANGE
        if key in self._seen:
            return WANTED
        self._forget()
        self._seen[key] = StorageWeakRef(tensor.untyped_storage())
        return STRANGE

    def home_of(self, tensor: Tensor) -> Home:
        """Returns the home of a tensor that has one."""
        return self._homes[_key(tensor)]

    def settle(self, tensor: Tensor) -> Home | None:
        """Moves the tensors of all ranks, of one length and type, to shared memory. All ranks must call this together.

        Returns:
            The home, or None, on all ranks, if one rank fails. The tensor then never gets a home.
        """
        self._forget()
        number, self._count = self._count, self._count + 1
        problems = [text for text in all_gather(_room(tensor, self._group), self._group) if text]
        found, problem = (None, "") if problems else _move(tensor)
        addresses = all_gather(found, self._group)
        flats: list[Tensor] = []
        if all(addresses):
            flats, problem = _open(addresses, tensor)
        problems += [text for text in all_gather(problem, self._group) if text]
        if problems:
            self._refuse(tensor, "; ".join(dict.fromkeys(problems)))
            return None
        home = self._homes[_key(tensor)] = Home(number, tuple(flats))
        return home

    def _refuse(self, tensor: Tensor, problem: str) -> None:
        if not self._refused and self._rank == 0:
            warnings.warn(f"gradients are copied to other ranks and back: {problem}", stacklevel=2)
        self._refused.add(_key(tensor))

    def leave(self) -> None:
        """Releases the memory of the other ranks."""
        self._homes.clear()

    def _forget(self) -> None:
        """Forgets tensors that were deleted, as another tensor may now have their address."""
        for key in [key for key, storage in self._seen.items() if storage.expired()]:
            del self._seen[key]
            self._homes.pop(key, None)
            self._refused.discard(key)


def _key(tensor: Tensor) -> _Key:
    return address(tensor.untyped_storage()), int(tensor.storage_offset()), tensor.numel(), tensor.dtype


def _room(tensor: Tensor, group: dist.ProcessGroup) -> str:
    """Returns the reason why shared memory has no space for every rank's tensor; empty if it has."""
    storage = tensor.untyped_storage()
    needed = 0 if storage.is_shared() else storage.nbytes() * dist.get_world_size(group)
    try:
        found = os.statvfs(DIRECTORY)
    except OSError as error:
        return f"{DIRECTORY} cannot be looked at ({error})"
    free = found.f_bavail * found.f_frsize
    if needed + _SPARE_NBYTES <= free:
        return ""
    return (
        f"{DIRECTORY} has {free / 2**20:.0f} MiB left for buckets of {needed / 2**20:.0f} MiB; a container's can be "
        "made larger (--shm-size)"
    )


def _move(tensor: Tensor) -> tuple[_Address | None, str]:
    try:
        descriptor, nbytes = shared_file(tensor.untyped_storage())
    except RuntimeError as error:
        return None, f"process {os.getpid()} could not share a bucket ({error})"
    offset = int(tensor.storage_offset()) * tensor.element_size()
    return _Address(os.getpid(), descriptor, nbytes, offset), ""


def _open(addresses: Sequence[_Address], like: Tensor) -> tuple[list[Tensor], str]:
    """Maps the tensors of all ranks. Returns them and a problem, empty if there is none.

    This rank's own tensor is mapped too: a reference to its storage would keep it alive forever.
    """
    flats = []
    for found in addresses:
        try:
            flats.append(_opened(found, like))
        except (OSError, ValueError) as error:
            return [], f"process {os.getpid()} cannot map a bucket of process {found.pid} ({error})"
    return flats, ""


def _opened(found: _Address, like: Tensor) -> Tensor:
    descriptor = os.open(f"/proc/{found.pid}/fd/{found.descriptor}", os.O_RDWR)
    try:
        memory = mmap.mmap(descriptor, found.file_nbytes)
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=found.offset_nbytes)
