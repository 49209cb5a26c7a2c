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
from pathlib import Path

import torch
from torch import Tensor

HEADER_NBYTES = mmap.PAGESIZE
_LINE = 64 // 8  # words in a cache line: each counter has one to itself
_NONCE = 0


@dataclass(frozen=True)
class Announcement:
    """How to find a rank's segment, and how to tell that it is the right one."""

    rank: int
    """Global rank."""
    pid: int
    born: str
    """When the process started, in the kernel's clock ticks: a process id alone may be used again."""
    fd: int
    nonce: int
    nbytes: int


class Segment:
    """One rank's memory: 64-bit counters, each on a cache line of its own, and ``nbytes`` for data."""

    def __init__(self, fd: int, announcement: Announcement) -> None:
        self.owner = announcement
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
            nonce = secrets.randbits(64)
            segment = cls(fd, Announcement(rank, os.getpid(), _birth_of_this_process(), fd, nonce, nbytes))
        except OSError:
            os.close(fd)
            raise
        segment._words[_NONCE] = nonce
        return segment

    @classmethod
    def open(cls, announcement: Announcement) -> Segment:
        """Another rank's segment.

        Raises:
            OSError: That process is not on this host, or does not let this one see its memory.
        """
        fd = os.open(f"/proc/{announcement.pid}/fd/{announcement.fd}", os.O_RDWR)
        try:
            if os.fstat(fd).st_size != HEADER_NBYTES + announcement.nbytes:
                raise OSError(f"process {announcement.pid} of this host is not the rank that was announced")
            segment = cls(fd, announcement)
        finally:
            os.close(fd)
        if segment._words[_NONCE] != announcement.nonce:
            raise OSError(f"process {announcement.pid} of this host is not the rank that was announced")
        return segment

    def counter(self, index: int) -> memoryview:
        """Counter ``index``, from 0, as a view of one word: item 0 is its value.

        A store to it is one aligned 64-bit store.
        """
        at = (index + 1) * _LINE
        return self._words[at : at + 1]

    def view(self, dtype: torch.dtype, offset: int, count: int) -> Tensor:
        """``count`` elements from byte ``offset`` of the data; shape (count,)."""
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=HEADER_NBYTES + offset)

    def hide(self) -> None:
        """Closes the owner's descriptor, by which others open the segment; maps stay as they are."""
        os.close(self.owner.fd)


@dataclass(frozen=True)
class ProcessState:
    """What ``/proc/<pid>/stat`` says of a process."""

    letter: str
    """R running, S sleeping, D in the kernel, T stopped, Z dead but not yet reaped..."""
    born: str


def process_state(pid: int) -> ProcessState | None:
    """The state of a process of this host; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return ProcessState(letter=fields[0], born=fields[19])


def _birth_of_this_process() -> str:
    state = process_state(os.getpid())
    if state is None:
        raise OSError("/proc does not show this process")
    return state.born


def has_died(owner: Announcement) -> bool:
    """Whether the process that announced the segment is gone."""
    state = process_state(owner.pid)
    return state is None or state.born != owner.born or state.letter in "ZXx"


def describe(owner: Announcement) -> str:
    """``rank 1 (process 4711) is stopped``, for a rank that others wait for."""
    who = f"rank {owner.rank} (process {owner.pid})"
    state = process_state(owner.pid)
    if state is None or has_died(owner):
        return f"{who} died"
    if state.letter in "Tt":
        return f"{who} is stopped (by SIGSTOP or a debugger)"
    return f"{who} is alive but did not come: busy elsewhere, or past an error"
