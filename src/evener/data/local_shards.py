"""Data that is divided before the training begins: each rank owns a part, as when hosts hold different files.

Then *who* holds a sample decides who computes it, and the order has to bring all parts to their end together, however
unequal they are. Each part deals its samples evenly over the epoch, sample ``k`` of ``n`` at time ``(k + 1/2) / n``,
and the epoch is what comes of merging them, ties to the lower rank::

    time       0        1/4       1/2       3/4        1
    part of 4  |    0         1         2         3    |      position   0 1 2 3 4 5
    part of 2  |         0                   1         |      rank       0 1 0 0 1 0

So after any number of samples all parts are used up to about the same fraction. A rank's number of samples before a
position is thus its number of seats in a parliament of that size by the method of Webster and Sainte-Laguë (Balinski
and Young, "Fair Representation", 1982): it never falls as the parliament grows, ends at the size of the part, and can
be computed at any position without those before it, so that a run may resume in mid-epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heapreplace
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from evener.data.batch_plan import BatchPlan, BatchPlanner
from evener.data.division import Table
from evener.data.sampler import Ids, Order
from evener.errors import ConfigurationError

Gather = Callable[[Any], list[Any]]
"""``gather(value)``: the value that each rank gave, in order of rank, the same on all."""


@dataclass(frozen=True)
class LocalShards:
    """The parts of a data set that the ranks own.

    A sample's id in the whole is its id in its part, behind those of the parts of lower ranks.
    """

    sizes: tuple[int, ...]
    """Samples of each rank; some may be 0."""
    rank: int

    @property
    def size(self) -> int:
        """Samples of all ranks together."""
        return sum(self.sizes)

    @property
    def offset(self) -> int:
        """The id in the whole of this rank's first sample."""
        return sum(self.sizes[: self.rank])

    @property
    def whole(self) -> Order:
        """The positions of an epoch; it knows nothing of their samples."""
        return Order(self.size, shuffle=False)

    def order(self, seed: int) -> Order:
        """The shuffled order of this rank's own part; equal parts of two ranks are shuffled differently."""
        return Order(max(1, self.sizes[self.rank]), seed + (self.rank << 32))

    def before(self, position: int) -> tuple[int, ...]:
        """How many samples of each part stand before ``position`` of an epoch; they add up to it."""
        return _seats(self.sizes, position)

    def shares(self, start: int, stop: int) -> tuple[int, ...]:
        """How many samples of each part stand at the positions ``[start, stop)``."""
        return tuple(b - a for a, b in zip(self.before(start), self.before(stop), strict=True))


def gather_parts(dataset: Any, rank: int, gather: Gather, name: str) -> tuple[Any, LocalShards]:
    """The parts of all ranks, and what this rank reads: its part, or if that is empty a sample of another rank.

    Args:
        dataset: This rank's part.
        rank: This rank.
        gather: Called alike on all ranks.
        name: What errors call the data set.

    Raises:
        ConfigurationError: If the parts are all empty, or have no length.
    """
    sizes = gather(None if isinstance(dataset, IterableDataset) else len(dataset))
    if None in sizes:
        raise ConfigurationError(
            f"the {name} of rank {sizes.index(None)} is an iterable dataset, whose length nobody knows, so that parts "
            'cannot end together; use Task(partition="batch") and give it a method shard(index, count) that returns '
            "what this rank holds"
        )
    parts = LocalShards(tuple(sizes), rank)
    if parts.size == 0:
        raise ConfigurationError(f"the {name} is empty on each of the {len(sizes)} ranks")
    if 0 not in sizes:
        return dataset, parts
    lender = next(owner for owner, size in enumerate(sizes) if size)
    lent = gather(_first(dataset) if rank == lender else None)[lender]
    return (dataset if sizes[rank] else _Lent(lent)), parts


class _Lent(Dataset[Any]):
    """One sample of another rank, for placeholders of a rank that owns none."""

    def __init__(self, item: Any) -> None:
        self._item = item

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return self._item


def _first(dataset: Any) -> Any:
    return dataset.__getitems__([0])[0] if hasattr(dataset, "__getitems__") else dataset[0]


def part_plans(
    parts: LocalShards, order: Order, cut: BatchPlanner, epochs: int, start: tuple[int, int] = (0, 0)
) -> Iterator[BatchPlan]:
    """As :func:`evener.data.batch_plan.plans`, with the shares that the parts have and ids of this rank's own part."""
    for epoch in range(start[0], epochs):
        position = start[1] if epoch == start[0] else 0
        for begin, end in parts.whole.batches(cut.batch_size, position):
            shares = parts.shares(begin, end)
            first = parts.before(begin)[cut.rank]
            ids = order.ids(epoch, first, first + shares[cut.rank])
            own = _slices(ids, cut.table(end - begin, shares), cut.rank)
            index, last = begin // cut.batch_size, end == parts.size
            yield BatchPlan(epoch, index, begin, end - begin, shares, last, own, parts.offset)


def _slices(ids: Ids, table: Table, rank: int) -> list[tuple[Ids, int]]:
    """``ids`` cut as the micro-batches are; the first sample of the part stands in for none."""
    own, taken = [], 0
    for row in table:
        count = len(row[rank])
        own.append((ids[taken : taken + count], 1) if count else (np.zeros(1, dtype=np.int64), 0))
        taken += count
    return own


@lru_cache(maxsize=64)
def _seats(sizes: Sequence[int], position: int) -> tuple[int, ...]:
    """How many of the first ``position`` samples each part has.

    At time ``t`` a part has dealt ``n t`` samples rounded, all together at most ``world_size / 2`` more than
    ``size t``; so at ``t = (position - world_size / 2) / size`` none too many, and at most ``world_size`` are missing.
    """
    size, ranks = sum(sizes), len(sizes)
    dealt = [max(0, (n * (2 * position - ranks) + size) // (2 * size)) for n in sizes]
    following = [(_time(n, dealt[rank]), rank) for rank, n in enumerate(sizes) if n]
    heapify(following)
    for _ in range(position - sum(dealt)):
        rank = following[0][1]
        dealt[rank] += 1
        heapreplace(following, (_time(sizes[rank], dealt[rank]), rank))
    return tuple(dealt)


def _time(size: int, sample: int) -> Fraction:
    """Twice the time at which a part deals a sample; beyond its end the times go on, and are never reached."""
    return Fraction(2 * sample + 1, size)
