"""Mailbox of the ranks of one host: every rank posts small messages that all ranks read, through shared memory.

A message over sockets takes a fraction of a millisecond and wakes up threads while the computation needs the cores.
In shared memory, sending is a store and receiving is a load::

    post()    message n of this rank lies in its slot n mod 4; then  entered[rank] = n + 1
    wait(n)   until entered[all] > n, then message n of all ranks can be read

A rank posts a message only after it has read the one before, so a slot is free when it is used again: a rank that posts
message n + 2 has read n + 1, so all ranks have posted that, so all have read n. Two slots would suffice; with four, a
rank may have two exchanges in progress.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from evener.distributed.shm.slots import ENTERED, Slots

MESSAGES = 4
"""Number of messages of a rank that exist at a time. Message n + MESSAGES lies where message n was."""


class Mailbox:
    """Messages of at most ``nbytes`` of all ranks of a group. All ranks must create it together.

    Args:
        group: Ranks of one host.
        nbytes: Size of a message in bytes; 0 if it only says that a rank has come.
        timeout_seconds: How long to wait for a rank. With a watchdog, waits end a little later, because its report
            says more.
        what: Name of the exchange, for error messages.

    Raises:
        ConfigurationError: On every rank, if the ranks do not share a host or the machine does not support it.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, timeout_seconds: float, what: str) -> None:
        self._slots = Slots(group, MESSAGES, nbytes, timeout_seconds, what)
        self._ranks = range(group.size())
        self.posted = 0
        """Number of messages that this rank has posted, which is the number of the next one."""

    def views(self, dtype: torch.dtype, start: int, count: int) -> list[list[Tensor]]:
        """Returns a view of ``count`` elements from element ``start`` of each message; shape (count,). Message n of a
        rank is item ``[n % MESSAGES][rank]``."""
        return [
            [self._slots.view(rank, slot, dtype, start, count) for rank in self._ranks]
            for slot in range(MESSAGES)
        ]

    def post(self) -> int:
        """Publishes this rank's next message, which must have been written. Returns its number."""
        self.posted += 1
        self._slots.count_call()
        self._slots.publish(ENTERED, self.posted)  # after the message; x86 keeps that order, see slots
        return self.posted - 1

    def wait(self, number: int) -> None:
        """Waits until all ranks have posted message ``number``.

        Raises:
            RankError: If the process of a rank is gone.
            RankTimeoutError: If a rank does not come in time.
        """
        self._slots.wait(ENTERED, number + 1)
