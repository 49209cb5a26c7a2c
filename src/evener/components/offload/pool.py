"""Rooms outside that are used again, so that a step asks for no new ones: which is given for what, which are let go.

A request gets the smallest free room that holds it, if that is no more than twice as large. Where there is none, a new
one is made, and those that nobody has wanted for a while are let go first: shares of a batch change, and with them all
sizes. A while is :data:`PATIENCE` times as many requests as rooms were ever used at once, about so many steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

PATIENCE = 4
LOOSEST = 2
"""How many times as large as a request its room may be."""

R = TypeVar("R")


@dataclass
class Free(Generic[R]):
    """A room that nobody uses."""

    room: R
    nbytes: int
    since: int
    """The number of requests before it was given back."""


class Pool(Generic[R]):
    """Gives rooms, and takes them back.

    Args:
        make: Makes a room of so many bytes.
    """

    def __init__(self, make: Callable[[int], R]) -> None:
        self._make = make
        self._free: list[Free[R]] = []
        self._returned = deque[tuple[R, int]]()  # from any thread, and while the others are looked through
        self._used = self._most = self._requests = 0
        self._closed = False
        self.nbytes = 0
        """Of all rooms."""
        self.peak = 0
        """The most that they ever were together."""

    def take(self, nbytes: int) -> tuple[R, int]:
        """A room for so many bytes, and how many it has."""
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
        """Nobody uses the room any more. May be called from any thread, and in the midst of :meth:`take`."""
        if not self._closed:
            self._returned.append((room, nbytes))

    def close(self) -> None:
        """Lets go of all that is free, and of the others as they are given back."""
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
