"""Short rows of numbers, added up over thousands of ranks: in blocks first, then over these.

A row that every rank gathers from all others goes through as many hands as there are ranks, and is read as often. Sums
go up and down a tree of two levels, of about as many branches each::

    ranks     0 1 2 3   4 5 6 7   8 9 10 11
               ╲│╱╱      ╲│╱╱      ╲│╱╱            each block's first rank adds up its block
                0 ──────── 4 ─────── 8             rank 0 adds up the blocks
               ╱│╲╲      ╱│╲╲      ╱│╲╲            and the sum goes back the same way: the same bits everywhere

It travels while the ranks compute, in a thread and over groups of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from evener.collectives.executor.subgroup import subgroup
from evener.collectives.executor.worker import Worker
from evener.distributed.hosts import destroy
from evener.distributed.watchdog.watchdog import Watchdog

MOST_ROWS = 64
"""Ranks up to which each step's row of every rank is gathered on all."""


class Summing(Protocol):
    """What adds up rows of all ranks."""

    def start(self, added: Sequence[float], greatest: Sequence[float]) -> Under:
        """Starts to add up ``added``, and to find the greatest of each of ``greatest``, which are no NaN."""


class Under(Protocol):
    """Sums under way."""

    def wait(self) -> tuple[list[float], list[float]]:
        """The sums and the greatest, the same bits on all ranks. To be called once.

        Raises:
            RankTimeoutError: If a rank did not take part in time; says which and where it stands.
            RankError: If a rank is gone.
        """


class Levels:
    """Sums over the ranks of ``group`` in two levels. All ranks make the same calls in the same order.

    Args:
        group: All ranks.
        timeout_seconds: How long to wait for a rank.
        watchdog: Marks the waits, and says who is missing when one fails.
        block: Ranks of a block, which are next to each other; by default as many as there are blocks.
    """

    def __init__(
        self, group: dist.ProcessGroup, timeout_seconds: float, watchdog: Watchdog, block: int | None = None
    ) -> None:
        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
        length = block or math.isqrt(world_size - 1) + 1
        first = rank // length * length
        members = range(first, min(first + length, world_size))
        self._watchdog = watchdog
        with ExitStack() as owned:
            self._block = _owned(owned, group, members, timeout_seconds)
            self._firsts = _owned(owned, group, range(0, world_size, length), timeout_seconds)
            self._worker = Worker("evener sums")
            owned.callback(self._worker.close)
            self._owned = owned.pop_all()

    def start(self, added: Sequence[float], greatest: Sequence[float]) -> Under:
        """See :class:`Summing`."""
        row = torch.tensor([*added, *greatest], dtype=torch.float64)
        return _OnTheWay(self._worker.submit(lambda: self._sum(row, len(added))), len(added), self._watchdog)

    def close(self) -> None:
        """Gives the groups back; every rank must have waited for all it started."""
        self._owned.close()

    def _sum(self, row: Tensor, added: int) -> Tensor:
        for group in (self._block, self._firsts):
            if group is not None:
                _to_the_first(row, added, group)
        for group in (self._firsts, self._block):
            if group is not None:
                dist.broadcast(row, group=group, group_src=0)
        return row


class _OnTheWay:
    def __init__(self, future: Future[Tensor], added: int, watchdog: Watchdog) -> None:
        self._future, self._added, self._watchdog = future, added, watchdog

    def wait(self) -> tuple[list[float], list[float]]:
        with self._watchdog.wait("control exchange"):
            numbers = self._future.wait().tolist()
        return numbers[: self._added], numbers[self._added :]


def _owned(
    owned: ExitStack, group: dist.ProcessGroup, members: Sequence[int], timeout_seconds: float
) -> dist.ProcessGroup | None:
    made = subgroup(group, members, timeout_seconds, "gloo")
    if made is not None:
        owned.callback(destroy, made)
    return made


def _to_the_first(row: Tensor, added: int, group: dist.ProcessGroup) -> None:
    """Adds up the rows of the group, in order of rank, in that of its first rank."""
    rows = None
    if dist.get_rank(group) == 0:
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.gather(row, rows, group=group, group_dst=0)
    for other in rows[1:] if rows else ():
        row[:added] += other[:added]
        torch.maximum(row[added:], other[added:], out=row[added:])
