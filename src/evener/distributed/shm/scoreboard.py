"""Exchanges a few numbers between all ranks of one host through shared memory.

The control message of each step would cost a message over sockets and wake up threads, which takes processor time from
the computation. On a board of shared memory, sending is a store and receiving is a load::

    post(row)   row of this rank ─▶ its slot n mod 4, then  entered[rank] = n + 1
    wait()      until entered[all] > n, then the rows of all ranks

A rank posts a row only after it has read the row before, so a slot is free when it is used again: a rank that posts row
n + 2 has read row n + 1, so all ranks have posted that, so all have read row n. Two slots would suffice; with four, a
rank may have two exchanges in progress.
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


class Scoreboard:
    """Replaces :meth:`Channel.exchange` for the ranks of one host. All ranks must create it together.

    Raises:
        ConfigurationError: On every rank, if the ranks do not share a host or the machine does not support it.
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
        """Frees this rank's hold on the shared memory. No exchange is possible afterwards."""
        self._rows, self._mine = [], []
        del self._slots

    def exchange(self, values: Sequence[float]) -> Pending:
        """Starts sending ``values`` to all ranks. Every rank must pass the same number of values, at most 64."""
        number, self._posted = self._posted, self._posted + 1
        row = self._mine[number % _SLOTS]
        row[: len(values)] = values
        self._slots.count_call()
        self._slots.publish(ENTERED, number + 1)  # after the values; x86 keeps that order, see slots
        return _Posted(self, number, len(values))

    def read(self, number: int, width: int) -> list[list[float]]:
        """Waits for row ``number`` of all ranks, and returns the rows, by rank."""
        with self._watchdog.wait(_WHAT):
            self._slots.wait(ENTERED, number + 1)
        return [row[:width].tolist() for row in self._rows[number % _SLOTS]]


class _Posted(Pending):
    def __init__(self, board: Scoreboard, number: int, width: int) -> None:
        self._board, self._number, self._width = board, number, width

    def wait(self) -> list[list[float]]:
        return self._board.read(self._number, self._width)


def quickest(session: Session) -> Scoreboard | Channel:
    """Returns a `Scoreboard` if all ranks share a host, else the session's control channel.

    All ranks must call this together.
    """
    if session.world is None or not isinstance(session.control, GroupChannel):
        return session.control
    try:
        return Scoreboard(session.world, session.watchdog, session.timeout_seconds)
    except ConfigurationError:  # raised on every rank alike
        return session.control


@contextmanager
def lent(session: Session) -> Iterator[Scoreboard | Channel]:
    """Provides :func:`quickest` for the block, and closes it at the end if it is a `Scoreboard`."""
    control = quickest(session)
    try:
        yield control
    finally:
        if isinstance(control, Scoreboard):
            control.close()
