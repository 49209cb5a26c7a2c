"""Exchanges a few numbers between all ranks of one host through a mailbox in shared memory.

The control message of each step would cost a message over sockets and wake up threads, which takes processor time from
the computation (:mod:`evener.distributed.shm.mailbox`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from evener.distributed.control_channel import Channel, GroupChannel, Pending, Rows
from evener.distributed.session import Session
from evener.distributed.shm.mailbox import MESSAGES, Mailbox
from evener.distributed.watchdog.watchdog import Watchdog
from evener.errors import ConfigurationError

WIDTH = 64
"""Numbers of an exchange, at most."""
_WHAT = "control exchange"


class Scoreboard:
    """Replaces :meth:`Channel.exchange` for the ranks of one host. All ranks must create it together.

    Raises:
        ConfigurationError: On every rank, if the ranks do not share a host or the machine does not support it.
    """

    def __init__(self, group: dist.ProcessGroup, watchdog: Watchdog, timeout_seconds: float) -> None:
        self._box = Mailbox(group, WIDTH * torch.float64.itemsize, timeout_seconds, _WHAT)
        views = self._box.views(torch.float64, 0, WIDTH)
        self._rows = [[view.numpy() for view in of_ranks] for of_ranks in views]
        self._mine = [rows[dist.get_rank(group)] for rows in self._rows]
        self._watchdog = watchdog

    def close(self) -> None:
        """Frees this rank's hold on the shared memory. No exchange is possible afterwards."""
        self._rows, self._mine = [], []
        del self._box

    def exchange(self, values: Sequence[float]) -> Rows:
        """Starts sending ``values`` to all ranks. Every rank must pass the same number of values, at most `WIDTH`."""
        self._mine[self._box.posted % MESSAGES][: len(values)] = values
        return Pending(partial(self._read, self._box.post(), len(values)))

    def _read(self, number: int, width: int) -> list[list[float]]:
        """Waits for row ``number`` of all ranks, and returns the rows, by rank."""
        with self._watchdog.wait(_WHAT):
            self._box.wait(number)
        return [row[:width].tolist() for row in self._rows[number % MESSAGES]]


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
