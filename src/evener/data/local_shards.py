"""Local data shards: each rank owns a part of the data set, for example because hosts hold different files.

Each rank computes the samples that it owns. The order must bring all parts to their end together, even if their sizes
differ. So each part spreads its samples evenly over the epoch, sample ``k`` of ``n`` at time ``(k + 1/2) / n``. The
epoch merges the parts by time; at equal times the lower rank comes first::

    time       0        1/4       1/2       3/4        1
    part of 4  |    0         1         2         3    |      position   0 1 2 3 4 5
    part of 2  |         0                   1         |      rank       0 1 0 0 1 0

So at any position about the same fraction of every part has been used. The number of samples of a rank before a
position is the number of seats that the method of Webster and Sainte-Laguë gives a party in a parliament of that size
(Balinski and Young, "Fair Representation", 1982). It never falls as the position grows, and it ends at the size of the
part. It can be computed for any position without the earlier ones, so a run may resume in mid-epoch.
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
"""``gather(value)`` returns the values of all ranks, by rank. All ranks must call it together."""


@dataclass(frozen=True)
class LocalShards:
    """The sizes of the parts of a data set that the ranks own.

    The global id of a sample is its id in its part plus ``offset``, the sizes of the parts of lower ranks.
    """

    sizes: tuple[int, ...]
    """Samples that each rank owns; some may be 0."""
    rank: int

    @property
    def size(self) -> int:
        """The number of samples of all ranks together."""
        return sum(self.sizes)

    @property
    def offset(self) -> int:
        """The global id of this rank's first sample."""
        return sum(self.sizes[: self.rank])

    @property
    def whole(self) -> Order:
        """An order over the positions of an epoch of all ranks. Its sample ids have no meaning."""
        return Order(self.size, shuffle=False)

    def order(self, seed: int) -> Order:
        """Returns the shuffled order of this rank's part. Ranks get different seeds."""
        return Order(max(1, self.sizes[self.rank]), seed + (self.rank << 32))

    def before(self, position: int) -> tuple[int, ...]:
        """Returns the number of samples of each part before ``position`` of an epoch. They add up to ``position``."""
        return seats(self.sizes, position)

    def shares(self, start: int, stop: int) -> tuple[int, ...]:
        """Returns the number of samples of each part at the positions ``[start, stop)``."""
        return tuple(b - a for a, b in zip(self.before(start), self.before(stop), strict=True))


def gather_parts(dataset: Any, rank: int, gather: Gather, name: str) -> tuple[Any, LocalShards]:
    """Gathers the sizes of all parts. Returns the data set that this rank reads, and the sizes.

    If this rank's part is empty, it reads one sample of another rank, as a placeholder. All ranks must call this
    together.

    Args:
        dataset: This rank's part.
        rank: This rank.
        gather: Gathers a value of every rank.
        name: The name of the data set in error messages.

    Raises:
        ConfigurationError: If all parts are empty, or one is iterable and has no length.
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
    """A data set of one sample of another rank, the placeholder of a rank that owns no sample."""

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
    """Yields plans like :func:`evener.data.batch_plan.plans`, with shares of ``parts`` and ids of this rank's part."""
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
    """Cuts ``ids`` into this rank's slices of micro-batches, with weights. Sample 0 is the placeholder of empty
    ones."""
    own, taken = [], 0
    for row in table:
        count = len(row[rank])
        own.append((ids[taken : taken + count], 1) if count else (np.zeros(1, dtype=np.int64), 0))
        taken += count
    return own


@lru_cache(maxsize=64)
def seats(sizes: Sequence[int], position: int) -> tuple[int, ...]:
    """Returns the number of samples of each part among the first ``position`` samples.

    At time ``t`` a part of ``n`` samples has used ``n t`` of them, rounded. All parts together have used at most
    ``world_size / 2`` more or less than ``size t``. So at ``t = (position - world_size / 2) / size`` no part has used
    too many, and at most ``world_size`` samples are missing. These are added one by one.
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
    """Returns twice the time of a sample in a part of ``size`` samples; above 2 for samples after its end."""
    return Fraction(2 * sample + 1, size)
