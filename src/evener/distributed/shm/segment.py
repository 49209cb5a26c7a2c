"""Shared memory segments of the ranks of one host, and the state of the processes that own them.

Each rank owns a segment: a page of counters, then slots for data. The segment has no name: ``memfd_create``
creates it, and the others open it through ``/proc/<pid>/fd/<fd>``. So there is nothing to unlink: the kernel
frees it when the last process that has it open is gone, even if all are killed by SIGKILL. The size of ``/dev/shm``,
64 MB in a container by default, does not matter either.

The ranks are not assumed to share a host. Each announces a random number and looks for the other's number *in the
other's memory*. A rank that does not find it there is on another host.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from evener.distributed.processes import find, state_of
from evener.distributed.shm.futex import address

HEADER_NBYTES = mmap.PAGESIZE
_LINE = 64 // 8  # words in a cache line: each counter has one to itself
_NONCE = 0


@dataclass(frozen=True)
class Announcement:
    """Says where a rank's segment is, and with ``nonce`` identifies it."""

    rank: int
    """Global rank."""
    pid: int
    fd: int
    nonce: int
    nbytes: int


class Segment:
    """One rank's shared memory: 64-bit counters, each on its own cache line, and ``nbytes`` of data."""

    def __init__(self, fd: int, announcement: Announcement, process: psutil.Process | None) -> None:
        self.owner = announcement
        self.process = process
        self._map = mmap.mmap(fd, HEADER_NBYTES + announcement.nbytes)
        self._words = memoryview(self._map)[:HEADER_NBYTES].cast("Q")  # data may be of any length

    @classmethod
    def create(cls, nbytes: int, rank: int) -> Segment:
        """Creates a segment of this process, filled with zeros.

        Raises:
            OSError: If the system has no anonymous shared memory, or too little.
        """
        fd = os.memfd_create("evener-all-reduce")
        try:
            os.posix_fallocate(fd, 0, HEADER_NBYTES + nbytes)  # an error now, not a SIGBUS later
            announcement = Announcement(rank, os.getpid(), fd, secrets.randbits(64), nbytes)
            segment = cls(fd, announcement, find(announcement.pid))
        except OSError:
            os.close(fd)
            raise
        segment._words[_NONCE] = announcement.nonce
        return segment

    @classmethod
    def open(cls, announcement: Announcement) -> Segment:
        """Opens another rank's segment.

        Raises:
            OSError: If that process is not on this host, or this process may not access its memory.
        """
        # The process is looked up before its memory is opened. If the memory then has the announced number, the process
        # is the owner, and another process that gets the same id later is not mistaken for it.
        process = find(announcement.pid)
        fd = os.open(f"/proc/{announcement.pid}/fd/{announcement.fd}", os.O_RDWR)
        try:
            if os.fstat(fd).st_size != HEADER_NBYTES + announcement.nbytes:
                raise _stranger(announcement)
            segment = cls(fd, announcement, process)
        finally:
            os.close(fd)
        if segment._words[_NONCE] != announcement.nonce:
            raise _stranger(announcement)
        return segment

    def counter(self, index: int) -> memoryview:
        """Returns counter ``index``, from 0, as a view of one word: item 0 is its value."""
        # Each access is one aligned 64-bit store or load: a reader sees the old or the new number, never a mix.
        at = (index + 1) * _LINE
        return self._words[at : at + 1]

    def address(self, index: int) -> int:
        """Returns the address of counter ``index`` in this process. It is valid while the segment is kept."""
        return address(self._map, 8 * (index + 1) * _LINE)

    def view(self, dtype: torch.dtype, offset: int, count: int) -> Tensor:
        """Returns a view of ``count`` elements from byte ``offset`` of the data; shape (count,)."""
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=HEADER_NBYTES + offset)

    def hide(self) -> None:
        """Closes the owner's descriptor, through which others open the segment. Existing mappings stay valid."""
        os.close(self.owner.fd)


def _stranger(announcement: Announcement) -> OSError:
    return OSError(f"process {announcement.pid} of this host is not the rank that was announced")


def has_died(segment: Segment) -> bool:
    """Returns True if the process that owns the segment is gone."""
    return state_of(segment.process) == "gone"


def describe(segment: Segment) -> str:
    """Describes a rank that others wait for: ``rank 1 (process 4711) is stopped (by SIGSTOP or a debugger)``."""
    who = f"rank {segment.owner.rank} (process {segment.owner.pid})"
    what = {
        "gone": "died",
        "stopped": "is stopped (by SIGSTOP or a debugger)",
        "running": "is alive but did not come: busy elsewhere, or past an error",
    }
    return f"{who} {what[state_of(segment.process)]}"
