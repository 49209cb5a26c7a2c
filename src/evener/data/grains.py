"""Batches cut by position into grains and blocks, for runs that are exact in bits.

Each rank takes a run of whole blocks, one grain after the other::

    samples    0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13      grains of 4, blocks of 1 grain
    rank 0     0 1 2 3 | 4 5 6 7                          shares 8, 6: the last block of the batch is smaller
    rank 1                         8 9 10 11 | 12 13

Where a grain begins and ends, which samples meet in it, and from which state of the random generators its samples are
read, depends on its position alone. So do its tensors, whatever the shares. Ranks may have different numbers of grains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from evener.core.config.exact_bits import ExactBits
from evener.data.audits import AuditedBlock, drawn_blocks
from evener.data.batch import Batch, with_fields
from evener.data.batch_plan import BatchPlan, BatchPlanner
from evener.data.costs import costs_of, divide_by_cost
from evener.data.division import by_weights, check_shares
from evener.data.fetch import Fetch
from evener.data.sampler import Ids
from evener.hardware.generators import seed_all, seed_of


def in_whole_blocks(bits: ExactBits, size: int, given: Sequence[int]) -> tuple[int, ...]:
    """Returns the shares of a batch of ``size`` samples in whole blocks, by largest remainder.

    Args:
        given: What a balancer gives of ``padded(bits, size)`` samples.

    Raises:
        ShareError: If these are not integers of at least 0 that add up to it.
    """
    return _in_whole_blocks(bits, size, tuple(given))


@lru_cache(maxsize=64)
def _in_whole_blocks(bits: ExactBits, size: int, given: tuple[int, ...]) -> tuple[int, ...]:
    check_shares(given, padded(bits, size), len(given))
    return _samples(bits, size, by_weights(bits.blocks(size), given))


def padded(bits: ExactBits, size: int) -> int:
    """Returns the number of samples for which a balancer is asked: those of whole blocks, as if the last was full."""
    return bits.blocks(size) * bits.block


def _samples(bits: ExactBits, size: int, blocks: Sequence[int]) -> tuple[int, ...]:
    """Returns the shares in samples for shares in blocks."""
    edges = [min(size, block * bits.block) for block in accumulate(blocks, initial=0)]
    return tuple(stop - start for start, stop in pairwise(edges))


def grain_positions(
    bits: ExactBits, position: int, shares: Sequence[int], rank: int, reads: int
) -> list[int | None]:
    """Returns the position in the epoch of each grain of ``rank``, and None for placeholders, which come before.

    Args:
        position: The position of the batch.
        shares: The samples of each rank, in whole blocks.
        reads: The number of micro-batches of this rank.
    """
    start = position + sum(shares[:rank])
    own: list[int | None] = [*range(start, start + shares[rank], bits.grain)]
    return [None] * (reads - len(own)) + own


@dataclass(frozen=True)
class GrainPlanner(BatchPlanner):
    """Gives each rank whole blocks of each global batch, as one micro-batch for each grain."""

    bits: ExactBits = field(kw_only=True)
    equally_many: bool = False
    """True if all ranks need the same number of micro-batches, because their passes communicate. Ranks with fewer
    grains then begin with placeholders."""
    audit: float = 0.0
    """The part of all blocks that a second rank computes as well."""
    seed: int = 0
    """The seed of the draw of these blocks."""

    def draw(self, step: int, size: int) -> tuple[int, ...]:
        given = tuple(self.shares(step, padded(self.bits, size)))
        check_shares(given, padded(self.bits, size), self.world_size)
        return in_whole_blocks(self.bits, size, given)

    def divided(
        self, step: int, ids: Ids, done: int
    ) -> tuple[tuple[int, ...], list[tuple[Ids, int]], tuple[float, ...]]:
        if self.by_cost is None:
            return super().divided(step, ids, done)
        shares, costs = self._by_cost(step, ids)
        return shares, self.reads(ids, shares, done), costs

    def _by_cost(self, step: int, ids: Ids) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Returns the shares by the costs of whole blocks, and the cost of each rank."""
        assert self.by_cost is not None
        bits, size = self.bits, len(ids)
        of_blocks = np.add.reduceat(self.by_cost.costs(ids), np.arange(0, size, bits.block))
        usual = [-(-share // bits.block) for share in self.draw(step, size)]
        most = [None if cap is None else cap // bits.block for cap in self.by_cost.max_shares or ()]
        fractions = self.by_cost.fractions(step, padded(bits, size))
        counts = divide_by_cost(of_blocks, fractions, usual, max_shares=most or None)
        shares = _samples(bits, size, counts.sum(axis=0).tolist())
        return shares, tuple(costs_of(of_blocks, counts).tolist())

    def reads(self, ids: Ids, shares: tuple[int, ...], done: int) -> list[tuple[Ids, int]]:
        start, grain = sum(shares[: self.rank]), self.bits.grain
        stop = start + shares[self.rank]
        own = [(ids[at : min(at + grain, stop)], 1) for at in range(start, stop, grain)]
        wanted = -(-max(shares) // grain) if self.equally_many else 1
        return [(ids[:1], 0)] * (wanted - len(own)) + own

    def audits(
        self, ids: Ids, shares: tuple[int, ...], place: tuple[int, int]
    ) -> tuple[tuple[AuditedBlock, ...], list[Ids]]:
        if not self.audit:
            return (), []
        owners = [rank for rank, share in enumerate(shares) for _ in range(self.bits.blocks(share))]
        audited = drawn_blocks(self.audit, self.seed, place, owners, self.world_size)
        return audited, [ids[at.start : at.stop] for _, at in self._audit_grains(audited, len(ids))]

    def _audit_grains(self, audited: Sequence[AuditedBlock], size: int) -> Iterator[tuple[int, range]]:
        """Yields block and samples of each grain of other ranks that this rank computes to compare."""
        for each in audited:
            if each.auditor == self.rank:
                start = each.block * self.bits.block
                stop = min(size, start + self.bits.block)
                for at in range(start, stop, self.bits.grain):
                    yield each.block, range(at, min(at + self.bits.grain, stop))

    def audit_positions(self, plan: BatchPlan) -> list[int]:
        """Returns the position in the epoch of each grain that this rank computes to compare."""
        return [plan.position + at.start for _, at in self._audit_grains(plan.audited, plan.size)]

    def marked(self, batch: Batch) -> Batch:
        """Returns the batch with the place of each grain in its micro-batches."""
        count = len(batch.micro_batches)
        places = grain_positions(self.bits, batch.position, batch.shares, self.rank, count)
        fillers = sum(place is None for place in places)
        marked = [
            with_fields(
                micro,
                position=place,
                ends_block=self._ends_block(at - fillers, at == count - 1),
                audit=self._audited(batch, place),
            )
            for at, (micro, place) in enumerate(zip(batch.micro_batches, places, strict=True))
        ]
        grains = list(self._audit_grains(batch.audited, batch.size))
        audits = [
            with_fields(
                micro,
                position=batch.position + at.start,
                ends_block=at.stop == batch.size or at.stop % self.bits.block == 0,
                audit=block,
            )
            for micro, (block, at) in zip(batch.audits, grains, strict=True)
        ]
        return with_fields(batch, micro_batches=marked, audits=audits)

    def _audited(self, batch: Batch, position: int | None) -> int | None:
        """Returns the number of the block of a grain if another rank computes it too, else None."""
        if position is None or not batch.audited:
            return None
        block = (position - batch.position) // self.bits.block
        return block if any(each.block == block for each in batch.audited) else None

    def _ends_block(self, grain: int, last: bool) -> bool:
        return last or (grain >= 0 and (grain + 1) % self.bits.grains_per_block == 0)


Request = tuple[Ids, int]
"""The samples of a grain, and the seed of the random numbers with which they are read and collated."""


def requests_of(plan: BatchPlan, cut: GrainPlanner, seed: int) -> list[Request]:
    """Returns the requests for what a plan reads."""
    places = grain_positions(cut.bits, plan.position, plan.shares, cut.rank, len(plan.reads))
    places += cut.audit_positions(plan)
    return [
        (ids, seed_of_grain(seed, plan.epoch, place))
        for ids, place in zip(plan.all_reads, places, strict=True)
    ]


def seed_of_grain(seed: int, number: int, position: int | None) -> int:
    """Returns the seed for the grain at ``position`` of epoch or step ``number``, or of a placeholder."""
    return seed_of(seed, number, -1 if position is None else position)


class GrainFetch(Dataset[Any]):
    """Reads the samples of a grain with random generators that depend on the grain alone. So random augmentation and
    random collation are the same on whichever rank and in whichever worker. Leaves the generators as they are then."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def __getitem__(self, request: Request) -> Any:
        ids, seed = request
        if self._fetch.may_draw:
            seed_all(seed)
        return self._fetch[ids]
