"""Memory that the ranks of one host share, and what can be learned through it about a rank that is late.

Each rank owns a segment: a page of counters, then slots for data. The segment has no name: ``memfd_create``
makes it, and the others open it through ``/proc/<pid>/fd/<fd>``. So there is nothing to unlink; the kernel
frees it when the last process that has it open is gone, however those end, SIGKILL at any moment included.
Nor does the size of ``/dev/shm`` matter, 64 MB in a container by default.

Whether the ranks share a host is not assumed. Each announces a random number and looks for the other's
number *in the other's memory*; a rank that cannot find it there is elsewhere.
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
    """How to find a rank's segment, and how to tell that it is the right one."""

    rank: int
    """Global rank."""
    pid: int
    fd: int
    nonce: int
    nbytes: int


class Segment:
    """One rank's memory: 64-bit counters, each on a cache line of its own, and ``nbytes`` for data."""

    def __init__(self, fd: int, announcement: Announcement, process: psutil.Process | None) -> None:
        self.owner = announcement
        self.process = process
        self._map = mmap.mmap(fd, HEADER_NBYTES + announcement.nbytes)
        self._words = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls, nbytes: int, rank: int) -> Segment:
        """A segment of this process, of zeros.

        Raises:
            OSError: The system has no anonymous shared memory, or too little.
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
        """Another rank's segment.

        Raises:
            OSError: That process is not on this host, or does not let this one see its memory.
        """
        # The process is found before its memory is opened. If the announced number is then in that memory, the process
        # is the owner, and a stranger that is given the same id later is known for one.
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
        """Counter ``index``, from 0, as a view of one word: item 0 is its value."""
        # One aligned 64-bit store or load each: a reader sees the old number or the new one, never half of each.
        at = (index + 1) * _LINE
        return self._words[at : at + 1]

    def address(self, index: int) -> int:
        """Where counter ``index`` lies in this process, for as long as the segment is kept."""
        return address(self._map, 8 * (index + 1) * _LINE)

    def view(self, dtype: torch.dtype, offset: int, count: int) -> Tensor:
        """``count`` elements from byte ``offset`` of the data; shape (count,)."""
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=HEADER_NBYTES + offset)

    def hide(self) -> None:
        """Closes the owner's descriptor, by which others open the segment; maps stay as they are."""
        os.close(self.owner.fd)


def _stranger(announcement: Announcement) -> OSError:
    return OSError(f"process {announcement.pid} of this host is not the rank that was announced")


def has_died(segment: Segment) -> bool:
    """Whether the process that owns the segment is gone."""
    return state_of(segment.process) == "gone"


def describe(segment: Segment) -> str:
    """``rank 1 (process 4711) is stopped``, for a rank that others wait for."""
    who = f"rank {segment.owner.rank} (process {segment.owner.pid})"
    what = {
        "gone": "died",
        "stopped": "is stopped (by SIGSTOP or a debugger)",
        "running": "is alive but did not come: busy elsewhere, or past an error",
    }
    return f"{who} {what[state_of(segment.process)]}"
