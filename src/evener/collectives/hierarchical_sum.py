"""Sums short rows of numbers over thousands of ranks: first inside blocks of ranks, then over the blocks.

An all-gather of rows would send every rank's row to every other rank. Sums go up and down a tree of two levels instead;
the number of blocks is about the number of ranks in a block::

    ranks     0 1 2 3   4 5 6 7   8 9 10 11
               ╲│╱╱      ╲│╱╱      ╲│╱╱            each block's first rank adds up its block
                0 ──────── 4 ─────── 8             rank 0 adds up the blocks
               ╱│╲╲      ╱│╲╲      ╱│╲╲            and the sum goes back the same way: the same bits everywhere

The sum runs in a thread, over its own process groups, while the ranks compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from evener.collectives.executor.subgroup import owned_subgroup
from evener.collectives.executor.worker import Worker
from evener.distributed.control_channel import Pending
from evener.distributed.watchdog.watchdog import Watchdog

MOST_ROWS = 64
"""Up to this number of ranks, every rank gathers the rows of all ranks in each step."""


class Summing(Protocol):
    """Sums rows of numbers over all ranks."""

    def start(
        self, added: Sequence[float], greatest: Sequence[float]
    ) -> Pending[tuple[list[float], list[float]]]:
        """Starts the elementwise sums of ``added`` and maxima of ``greatest``, which must contain no NaN.

        Returns both, to be waited for.
        """


class Levels:
    """Sums over the ranks of ``group`` in two levels. All ranks must make the same calls in the same order.

    Args:
        group: All ranks.
        timeout_seconds: The longest wait for a rank.
        watchdog: Marks the waits, and names the missing rank if one fails.
        block: Number of consecutive ranks in a block; by default about the square root of the number of ranks.
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
            self._block = owned_subgroup(owned, group, members, timeout_seconds, "gloo")
            firsts = range(0, world_size, length)
            self._firsts = owned_subgroup(owned, group, firsts, timeout_seconds, "gloo")
            self._worker = Worker("evener sums")
            owned.callback(self._worker.close)
            self._owned = owned.pop_all()

    def start(
        self, added: Sequence[float], greatest: Sequence[float]
    ) -> Pending[tuple[list[float], list[float]]]:
        """Starts the sums and maxima; see :class:`Summing`."""
        row = torch.tensor([*added, *greatest], dtype=torch.float64)
        future = self._worker.submit(lambda: self._sum(row, len(added)))

        def wait() -> tuple[list[float], list[float]]:
            with self._watchdog.wait("control exchange"):
                numbers = future.wait().tolist()
            return numbers[: len(added)], numbers[len(added) :]

        return Pending(wait)

    def close(self) -> None:
        """Destroys the groups. Every rank must have waited for all sums that it started."""
        self._owned.close()

    def _sum(self, row: Tensor, added: int) -> Tensor:
        for group in (self._block, self._firsts):
            if group is not None:
                _to_the_first(row, added, group)
        for group in (self._firsts, self._block):
            if group is not None:
                dist.broadcast(row, group=group, group_src=0)
        return row


def _to_the_first(row: Tensor, added: int, group: dist.ProcessGroup) -> None:
    """Combines the rows of the group's ranks, in order of rank, into the row of its first rank, in place."""
    rows = None
    if dist.get_rank(group) == 0:
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.gather(row, rows, group=group, group_dst=0)
    for other in rows[1:] if rows else ():
        row[:added] += other[:added]
        torch.maximum(row[added:], other[added:], out=row[added:])
