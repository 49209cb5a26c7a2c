"""A pool of buffers for offloaded tensors. Buffers are reused, so that a step usually allocates none.

A request gets the smallest free buffer that is large enough, and at most twice as large. If there is none, buffers that
have been free for long are dropped, and a new one is allocated: shares of a batch change, and all sizes with them. "For
long" means :data:`PATIENCE` times as many requests as buffers were ever used at once, which is about :data:`PATIENCE`
steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

PATIENCE = 4
LOOSEST = 2
"""Maximum size of a buffer relative to the request."""

R = TypeVar("R")


@dataclass
class Free(Generic[R]):
    """A free buffer."""

    room: R
    nbytes: int
    since: int
    """The number of requests before it was returned."""


class Pool(Generic[R]):
    """Gives out buffers and takes them back.

    Args:
        make: Allocates a buffer of the given number of bytes.
    """

    def __init__(self, make: Callable[[int], R]) -> None:
        self._make = make
        self._free: list[Free[R]] = []
        self._returned = deque[tuple[R, int]]()  # filled by any thread, also during take_buffer
        self._used = self._most = self._requests = 0
        self._closed = False
        self.nbytes = 0
        """Bytes of all buffers."""
        self.peak = 0
        """The maximum of ``nbytes`` so far."""

    def take_buffer(self, nbytes: int) -> tuple[R, int]:
        """Returns a buffer of at least ``nbytes`` bytes, and its size."""
        self._requests += 1
        self._come_back()
        fitting = [each for each in self._free if nbytes <= each.nbytes <= LOOSEST * nbytes]
        if not fitting:
            self._let_go()
            room = self._make(nbytes)
            self.nbytes += nbytes
            self.peak = max(self.peak, self.nbytes)
            return self._given(room, nbytes)
        found = min(fitting, key=lambda each: each.nbytes)
        self._free.remove(found)
        return self._given(found.room, found.nbytes)

    def _given(self, room: R, nbytes: int) -> tuple[R, int]:
        self._used += 1
        self._most = max(self._most, self._used)
        return room, nbytes

    def give_back(self, room: R, nbytes: int) -> None:
        """Returns a buffer to the pool. May be called from any thread, also during :meth:`take_buffer`."""
        if not self._closed:
            self._returned.append((room, nbytes))

    def close(self) -> None:
        """Drops all free buffers, and the others when they are returned."""
        self._closed = True
        self._free.clear()
        self._returned.clear()

    def _come_back(self) -> None:
        while self._returned:
            room, nbytes = self._returned.popleft()
            self._used -= 1
            self._free.append(Free(room, nbytes, self._requests))

    def _let_go(self) -> None:
        oldest = self._requests - PATIENCE * self._most
        kept = [each for each in self._free if each.since >= oldest]
        self.nbytes -= sum(each.nbytes for each in self._free) - sum(each.nbytes for each in kept)
        self._free = kept
