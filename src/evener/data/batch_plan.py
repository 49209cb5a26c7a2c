"""Batch plans: which samples each rank reads for each global batch, decided before anything is read.

Plans are made lazily and in order, so the load balancer is asked for the shares of a batch once, as late as possible.
Every rank makes the same plans, except for its own sample ids, and needs no communication to do so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from evener.data.audits import AuditedBlock
from evener.data.batch import Batch, MicroBatch, Skipped
from evener.data.costs import CostDivision
from evener.data.division import Table, by_weights, check_shares, divide
from evener.data.fetch import Fetched
from evener.data.sampler import Ids, Order
from evener.errors import ConfigurationError

_ASKED = 4096
"""The number of sample ids for which an order is asked at once, if batches are smaller."""
Shares = Callable[[int, int], Sequence[int]]
"""``shares(step, size)`` returns how many of the ``size`` samples of global batch ``step`` each rank takes."""


@dataclass(frozen=True)
class BatchPlanner:
    """Divides each global batch over the ranks and micro-batches. ``rank`` is this process's rank."""

    batch_size: int
    shares: Shares
    rank: int = 0
    world_size: int = 1
    micro_batch: int | None = None
    """Samples over all ranks in one micro-batch; ``None`` makes the whole batch one micro-batch."""
    by_cost: CostDivision | None = None
    """Divides batches by the costs of their samples; ``None`` divides them by numbers of samples."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigurationError(f"the batch size must be at least 1, not {self.batch_size}")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ConfigurationError(f"the micro-batch size must be at least 1, not {self.micro_batch}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigurationError(f"rank {self.rank} is not one of {self.world_size} ranks")

    def draw(self, step: int, size: int) -> tuple[int, ...]:
        """Returns the shares of global batch ``step``.

        Raises:
            ShareError: If the shares are not one integer of at least 0 for each rank, or do not add up to ``size``.
        """
        return _checked(tuple(self.shares(step, size)), size, self.world_size)

    def table(self, size: int, shares: Sequence[int]) -> Table:
        """Returns the positions that each rank takes of each micro-batch; see :func:`evener.data.division.divide`."""
        return _divided(size, tuple(shares), self.micro_batch)

    def divided(
        self, step: int, ids: Ids, done: int
    ) -> tuple[tuple[int, ...], list[tuple[Ids, int]], tuple[float, ...]]:
        """Returns the shares of a global batch, what this rank reads of it, and each rank's cost if costs are known.

        Args:
            ids: The samples of the global batch.
            done: The number of samples of the training before it.

        Raises:
            ShareError: As :meth:`draw`.
            DataError: If the cost of a sample is not positive and finite.
        """
        shares = self.draw(step, len(ids))
        if self.by_cost is not None:
            return self.by_cost.divided(ids, step, shares, self.micro_batch, self.rank)
        return shares, self.reads(ids, shares, done), ()

    def reads(self, ids: Ids, shares: tuple[int, ...], done: int) -> list[tuple[Ids, int]]:
        """Returns the samples that this rank reads of a global batch: for each micro-batch the ids and its weight.

        Args:
            ids: The samples of the global batch.
            done: The number of samples of the training before it.
        """
        own = _own(len(ids), shares, self.micro_batch, self.rank)
        return [(ids[part], weight) for part, weight in own]

    def audits(
        self, ids: Ids, shares: tuple[int, ...], place: tuple[int, int]
    ) -> tuple[tuple[AuditedBlock, ...], list[Ids]]:
        """Returns the blocks that two ranks compute, and the samples of each grain that this rank computes to compare.

        Args:
            ids: The samples of the global batch.
            place: Its epoch, and its position there.
        """
        return (), []


@lru_cache(maxsize=64)
def _checked(shares: tuple[int, ...], size: int, world_size: int) -> tuple[int, ...]:
    check_shares(shares, size, world_size)
    return tuple(int(share) for share in shares)


@lru_cache(maxsize=64)
def _divided(size: int, shares: tuple[int, ...], micro_batch: int | None) -> Table:
    return divide(size, shares, micro_batch)


@dataclass(slots=True)  # to make a frozen one takes three times as long, in every step
class BatchPlan:
    """The plan of one global batch for this rank. The first six fields are those of :class:`Batch`."""

    epoch: int
    index: int
    position: int
    size: int
    shares: tuple[int, ...]
    last: bool
    reads: list[tuple[Ids, int]]
    """For each micro-batch the sample ids to read, and its weight (0 for a placeholder)."""
    offset: int = 0
    """The number added to the sample ids, so that samples of different ranks' own data sets have different ids."""
    costs: tuple[float, ...] = ()
    """The cost of each rank's samples; empty if the task gives no costs."""
    audited: tuple[AuditedBlock, ...] = ()
    audit_reads: list[Ids] = field(default_factory=list)
    """See :meth:`BatchPlanner.audits`."""

    @property
    def all_reads(self) -> list[Ids]:
        """The sample ids to read, those of audits at the end."""
        return [ids for ids, _ in self.reads] + self.audit_reads

    def batch(self, values: list[Fetched]) -> Batch:
        """Builds the batch from the values that were read for ``all_reads``, one for each micro-batch."""
        if len(values) != len(self.reads) + len(self.audit_reads):
            raise ValueError(
                f"{len(values)} values for {len(self.reads)} + {len(self.audit_reads)} micro-batches"
            )
        micro_batches: list[MicroBatch] = []
        skipped: tuple[Skipped, ...] = ()
        for value, (ids, weight) in zip(values, self.reads, strict=False):
            micro_batches.append(self._micro_batch(value, ids, weight))
            if value.skipped and weight:
                skipped += tuple(Skipped(one.sample + self.offset, one.words) for one in value.skipped)
        audits: list[MicroBatch] = []
        if self.audit_reads:
            read_again = zip(values[len(self.reads) :], self.audit_reads, strict=True)
            audits = [self._micro_batch(value, ids, 1) for value, ids in read_again]
        place = (self.epoch, self.index, self.position, self.size, self.shares)
        more = (None, self.costs, self.audited, audits)
        return Batch(*place, micro_batches, self.last, skipped, *more)

    def _micro_batch(self, value: Fetched, ids: Ids, weight: int) -> MicroBatch:
        ids = ids if value.samples is None else value.samples
        samples = torch.from_numpy(ids + self.offset if self.offset else ids)
        return MicroBatch(value.inputs, value.targets, samples, 0 if value.stands_in else weight)


def plans(
    order: Order, cut: BatchPlanner, epochs: int, start: tuple[int, int] = (0, 0), first_step: int = 0
) -> Iterator[BatchPlan]:
    """Yields the plan of every global batch from ``start`` to the end of the last epoch.

    Args:
        start: An epoch and a position in it. The position need not be a multiple of the batch size; the index of the
            batch is then rounded down.
    """
    step = first_step
    for epoch in range(start[0], epochs):
        for begin, ids in _batches(order, cut.batch_size, epoch, start[1] if epoch == start[0] else 0):
            end = begin + len(ids)
            shares, reads, costs = cut.divided(step, ids, epoch * order.size + begin)
            index = begin // cut.batch_size
            last = end == order.size
            audits = cut.audits(ids, shares, (epoch, begin))
            yield BatchPlan(epoch, index, begin, end - begin, shares, last, reads, 0, costs, *audits)
            step += 1


def _batches(order: Order, batch_size: int, epoch: int, position: int) -> Iterator[tuple[int, Ids]]:
    """Yields the position and the sample ids of each global batch from ``position`` to the end of the epoch.

    :class:`Order` itself is asked for the ids of several small batches at once, which takes the time of one. Other
    orders may group the samples of what is asked for.
    """
    at_once = _ASKED // batch_size if type(order).ids is Order.ids else 1
    most = max(at_once, 1) * batch_size
    for first in range(position, order.size, most):
        ids = order.ids(epoch, first, min(first + most, order.size))
        for begin in range(0, len(ids), batch_size):
            yield first + begin, ids[begin : begin + batch_size]


def equal_shares(world_size: int) -> Shares:
    """Returns a function that gives equal shares. They differ by at most one; lower ranks get the larger ones."""

    @lru_cache(maxsize=16)
    def divided(size: int) -> list[int]:
        return by_weights(size, [1] * world_size)

    return lambda step, size: divided(size)


@lru_cache(maxsize=64)
def _own(
    size: int, shares: tuple[int, ...], micro_batch: int | None, rank: int
) -> tuple[tuple[slice, int], ...]:
    """Returns the slice of ``rank`` of each micro-batch, and its weight. A placeholder takes the place of an empty
    one."""
    table = _divided(size, shares, micro_batch)
    return tuple(
        (slice(row[rank].start, row[rank].stop), 1)
        if row[rank]
        else (slice(row[0].start, row[0].start + 1), 0)
        for row in table
    )
