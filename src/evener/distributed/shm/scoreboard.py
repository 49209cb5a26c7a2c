"""A few numbers from every rank to every rank of one host, through shared memory.

What a rank tells the others once a step would cost a message over sockets each time, and wake up threads that the
computation needs. On a board of shared memory it is a store, and reading what all have written is a load::

    post(row)   row of this rank ─▶ its slot n mod 4, then  entered[rank] = n + 1
    wait()      until entered[all] > n, then the rows of all ranks

A row is posted only after the one before was read, so that a slot is free again when its turn comes: who posts row
n + 2 has read row n + 1, so all have posted that, so all have read row n. Two slots would do; with four, a rank may
have two rows under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from evener.distributed.control_channel import Channel, GroupChannel, Pending
from evener.distributed.session import Session
from evener.distributed.shm.slots import ENTERED, Slots
from evener.distributed.watchdog.watchdog import Watchdog
from evener.errors import ConfigurationError

_SLOTS = 4
_WIDTH = 64
_WHAT = "control exchange"


class Board:
    """Rows of float64 numbers, as :meth:`Channel.exchange` has them, for the ranks of one host.

    Raises:
        ConfigurationError: The ranks do not share a host, or the machine cannot do it; on every rank alike.
    """

    def __init__(self, group: dist.ProcessGroup, watchdog: Watchdog, timeout_seconds: float) -> None:
        self._slots = Slots(group, _SLOTS, _WIDTH * torch.float64.itemsize, timeout_seconds, _WHAT)
        ranks, rank = range(dist.get_world_size(group)), dist.get_rank(group)
        self._rows = [[self._view(other, slot) for other in ranks] for slot in range(_SLOTS)]
        self._mine = [rows[rank] for rows in self._rows]
        self._watchdog = watchdog
        self._posted = 0

    def _view(self, rank: int, slot: int) -> NDArray[np.float64]:
        row: NDArray[np.float64] = self._slots.view(rank, slot, torch.float64, 0, _WIDTH).numpy()
        return row

    def close(self) -> None:
        """Gives back the shared memory, as far as this rank holds it; nothing more is exchanged."""
        self._rows, self._mine = [], []
        del self._slots

    def exchange(self, values: Sequence[float]) -> Pending:
        """Starts telling all ranks ``values``, as many on every rank and at most 64."""
        number, self._posted = self._posted, self._posted + 1
        row = self._mine[number % _SLOTS]
        row[: len(values)] = values
        self._slots.count_call()
        self._slots.publish(ENTERED, number + 1)  # after the values, and x86 keeps that order: see slots
        return _Posted(self, number, len(values))

    def read(self, number: int, width: int) -> list[list[float]]:
        """The rows that all ranks posted as their ``number``-th, when all have."""
        with self._watchdog.wait(_WHAT):
            self._slots.wait(ENTERED, number + 1)
        return [row[:width].tolist() for row in self._rows[number % _SLOTS]]


class _Posted(Pending):
    def __init__(self, board: Board, number: int, width: int) -> None:
        self._board, self._number, self._width = board, number, width

    def wait(self) -> list[list[float]]:
        return self._board.read(self._number, self._width)


def quickest(session: Session) -> Board | Channel:
    """A board in place of a channel over sockets where the ranks share a host, else the session's channel.

    A collective call.
    """
    if session.world is None or not isinstance(session.control, GroupChannel):
        return session.control
    try:
        return Board(session.world, session.watchdog, session.timeout_seconds)
    except ConfigurationError:  # raised on every rank alike
        return session.control


@contextmanager
def lent(session: Session) -> Iterator[Board | Channel]:
    """:func:`quickest`, whose memory is given back at the end if it is a board."""
    control = quickest(session)
    try:
        yield control
    finally:
        if isinstance(control, Board):
            control.close()
