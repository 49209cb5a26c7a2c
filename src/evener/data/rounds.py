"""Rounds of local steps: which samples each replica trains on between two merges, and in which order.

A round is ``sync_every`` batches of the global order. Its samples are divided over *replicas*, each of which takes
steps of its own on its part. Every local batch has about ``batch_size / replicas`` samples, so a replica with a larger
share takes more steps, and all of them are through at the same time::

    4 batches of 8 samples, shares 24 and 8, two fragments

    replica 0    4 4 4 | 4 4 4       6 local steps
    replica 1        4 |     4       2 local steps
                       └ fragment 0  └ fragment 1 merges

A rank may carry several replicas. Between two merges it takes the local steps of one after the other. Or several ranks
form the *team* of a replica, and each computes a part of its local batches. The plan of a round depends on the shares
of the replicas, and not on which rank computes what, so the training does not either.

In a round of warm-up, all replicas take each batch together, as one step of data parallelism.

With a quorum, a round has several merges, one every ``sync_every`` batches, and all replicas meet in the last one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import TypeVar

from evener.data.batch import Batch
from evener.data.batch_plan import BatchPlanner
from evener.data.division import by_weights, divide
from evener.data.sampler import Ids

T = TypeVar("T")


@dataclass(frozen=True)
class LocalBatch:
    """The samples of one step of one replica, in passes. Positions count from the start of the round."""

    replica: int
    passes: tuple[range, ...]
    """The positions of this rank in each forward and backward pass. An empty range is a placeholder, for a rank of a
    team that has no sample in a pass. There are no passes if the replica has no samples in a step of warm-up."""
    batches: int
    """The number of the round's batches to which the replica has come after this step, for its learning rate."""


@dataclass(frozen=True)
class RoundSegment:
    """The local steps up to a moment at which fragments are sent or merged."""

    local: tuple[LocalBatch, ...]
    sent: tuple[int, ...]
    """The fragments whose differences are sent after these steps."""
    merged: tuple[int, ...]
    """The fragments that are merged after these steps."""


@dataclass(frozen=True)
class RoundPlan:
    """What the replicas of one rank do in a round."""

    batches: int
    """The number of batches in the round. The last one of an epoch may have fewer than others."""
    together: tuple[tuple[LocalBatch, ...], ...]
    """Steps of warm-up, which all replicas take together: for each the samples of the replicas of this rank."""
    segments: tuple[RoundSegment, ...]

    @cached_property
    def passes(self) -> tuple[range, ...]:
        """The positions of every pass, in the order in which the rank takes them."""
        local = [batch for step in self.together for batch in step]
        local += [batch for segment in self.segments for batch in segment.local]
        return tuple(each for batch in local for each in batch.passes)


@dataclass(frozen=True)
class Rounds:
    """How a training is divided into rounds, and a round into local steps."""

    replicas: int
    sync_every: int
    """The number of batches between two merges."""
    batch_size: int
    """The number of samples in a batch, over all replicas."""
    rank: int = 0
    ranks: int = 1
    micro_batch: int | None = None
    """The number of samples in a pass, over all replicas. None means whole local batches."""
    warmup_steps: int = 0
    """The number of batches at the start of the training that all replicas take together."""
    fragments: int = 1
    """The number of parts of the model that merge in turn."""
    delay: int = 0
    """The number of batches between the moment in which a fragment is sent and the one in which it merges."""
    merges: int = 1
    """The number of merges of the whole model in a round."""

    @property
    def batches(self) -> int:
        """The number of batches in a round."""
        return self.sync_every * self.merges

    @property
    def size(self) -> int:
        """The number of samples in a round."""
        return self.batches * self.batch_size

    @property
    def team(self) -> int:
        """The number of ranks that compute a replica."""
        return max(1, self.ranks // self.replicas)

    @property
    def parts(self) -> int:
        """The number of shares of a round: one for each replica, or for each rank if a replica has several."""
        return self.replicas * self.team

    @property
    def meets(self) -> bool:
        """True if all ranks compute one replica together."""
        return self.replicas == 1

    @property
    def carried(self) -> range:
        """The replicas that this rank computes, alone or with its team."""
        return carried_by(self.rank // self.team, self.ranks // self.team, self.replicas)

    @property
    def leads(self) -> bool:
        """True if this rank is the first of its team, or alone."""
        return self.rank % self.team == 0

    def part_of(self, replica: int) -> int:
        """Returns the place among the shares of what this rank computes of a replica."""
        return replica * self.team + self.rank % self.team

    def count(self, batches: int | None) -> int | None:
        """Returns the number of rounds that ``batches`` batches take."""
        return None if batches is None else -(-batches // self.batches)

    def of_ranks(self, shares: Sequence[int]) -> tuple[int, ...]:
        """Returns the sum of ``shares`` for each rank."""
        if self.team > 1:
            return tuple(shares)
        parts = [carried_by(rank, self.ranks, self.replicas) for rank in range(self.ranks)]
        return tuple(sum(shares[part.start : part.stop]) for part in parts)

    def plan(self, shares: tuple[int, ...], done: int) -> RoundPlan:
        """Returns the plan of a round.

        Args:
            shares: The number of samples of each part.
            done: The number of samples that the training has had before the round.
        """
        size = sum(shares)
        return _plan(self, shares, min(size, max(0, self.warmup_steps * self.batch_size - done)))

    def of_team(self, parts: Sequence[T], replica: int) -> Sequence[T]:
        """Selects from ``parts`` (one for each part) those of the ranks that compute a replica."""
        return parts[replica * self.team : (replica + 1) * self.team]

    def local_batch(self, replica: int, start: int, shares: Sequence[int], batches: int) -> LocalBatch:
        """Returns a local batch, cut into passes of a replica's part of the micro-batch, as one device does.

        Args:
            start: Its first position.
            shares: The number of samples of each rank of the team.
            batches: As in `LocalBatch`.
        """
        most = None if self.micro_batch is None else max(1, self.micro_batch // self.replicas)
        rows = divide(sum(shares), shares, most) if any(shares) else ()
        mine = [row[self.rank % self.team] or row[0][:0] for row in rows]
        return LocalBatch(replica, tuple(range(start + own.start, start + own.stop) for own in mine), batches)


def carried_by(rank: int, ranks: int, replicas: int) -> range:
    """Returns the replicas that ``rank`` carries. Lower ranks carry the larger numbers of them."""
    edges = list(accumulate(by_weights(replicas, [1] * ranks), initial=0))
    return range(edges[rank], edges[rank + 1])


@lru_cache(maxsize=64)
def _plan(rounds: Rounds, shares: tuple[int, ...], warm: int) -> RoundPlan:
    size = sum(shares)
    batches, warm_batches = -(-size // rounds.batch_size), -(-warm // rounds.batch_size)
    rows = divide(size, shares, rounds.batch_size)[:warm_batches] if warm else ()
    together = tuple(
        tuple(
            rounds.local_batch(replica, own[0].start, [len(each) for each in own], step + 1)
            for replica in rounds.carried
            if (own := rounds.of_team(row, replica))
        )
        for step, row in enumerate(rows)
    )
    left = [share - sum(len(row[part]) for row in rows) for part, share in enumerate(shares)]
    of_teams = [list(rounds.of_team(left, replica)) for replica in range(rounds.replicas)]
    edges = list(accumulate(map(sum, of_teams), initial=min(size, warm_batches * rounds.batch_size)))
    local = {
        replica: _local(rounds, replica, edges[replica], of_teams[replica], warm_batches, batches)
        for replica in rounds.carried
    }
    return RoundPlan(batches, together, tuple(_segments(rounds, local, batches - warm_batches)))


def _local(
    rounds: Rounds, replica: int, start: int, left: list[int], before: int, batches: int
) -> list[LocalBatch]:
    """Returns the local steps of a replica: as many as make local batches of the usual size.

    Args:
        start: Its first position.
        left: The number of samples of each rank of its team.
        before: The number of batches of warm-up.
    """
    whole = sum(left)
    if not whole:
        return []
    usual = max(1.0, rounds.batch_size / rounds.replicas)
    rounded = math.ceil if rounds.replicas == 1 else round  # one replica takes the batches of one device
    steps = 1 if batches - before == 1 else max(1, rounded(whole / usual))
    found = []
    for step, (first, last) in enumerate(pairwise([*(int(step * usual) for step in range(steps)), whole])):
        shares = by_weights(last - first, left)
        left = [have - taken for have, taken in zip(left, shares, strict=True)]
        at = before + (batches - before) * (step + 1) // steps
        found.append(rounds.local_batch(replica, start + first, shares, at))
    return found


def _segments(rounds: Rounds, local: dict[int, list[LocalBatch]], batches: int) -> Iterator[RoundSegment]:
    """Yields the segments of ``batches`` batches. In a round that is cut short, nothing is sent ahead."""
    if not batches:
        return
    fragments, delay = rounds.fragments, rounds.delay if batches == rounds.batches else 0
    merges = [(batches * (fragment + 1) / fragments, fragment) for fragment in range(fragments)]
    if rounds.merges > 1:
        merges += [(moment, 0) for moment in range(rounds.sync_every, batches, rounds.sync_every)]
    before = 0.0
    for moment in sorted({merge - early for merge, _ in merges for early in (0, delay)}):
        yield RoundSegment(
            tuple(each for steps in local.values() for each in _between(steps, before, moment, batches)),
            tuple(fragment for merge, fragment in merges if merge - delay == moment),
            tuple(fragment for merge, fragment in merges if merge == moment),
        )
        before = moment


def _between(steps: list[LocalBatch], before: float, moment: float, batches: int) -> list[LocalBatch]:
    """Returns the steps that a replica takes between two moments, which count batches of the round."""
    return steps[math.floor(len(steps) * before / batches) : math.floor(len(steps) * moment / batches)]


@dataclass(frozen=True)
class RoundPlanner(BatchPlanner):
    """Plans the rounds of one rank."""

    rounds: Rounds | None = None

    def reads(self, ids: Ids, shares: tuple[int, ...], done: int) -> list[tuple[Ids, int]]:
        assert self.rounds is not None
        passes = self.rounds.plan(shares, done).passes
        return [
            (ids[each.start : each.stop], 1) if each else (ids[each.start : each.start + 1], 0)
            for each in passes
        ]


@dataclass
class RoundBatch(Batch):
    """A round. Its samples are read while the replicas train; ``micro_batches`` is empty."""

    passes: Iterable[Batch] = ()
    """The passes of :attr:`RoundPlan.passes`, in this order: each a batch of one micro-batch. They can be read once."""
    done: int = 0
    """The number of samples that the training has had before the round."""
    of_ranks: tuple[int, ...] = ()
    """The number of samples of each rank. ``shares`` has those of each part (`Rounds.parts`)."""

    def without_samples(self) -> Batch:
        """Returns the batch without its samples, with the shares of the ranks."""
        return Batch(
            self.epoch, self.index, self.position, self.size, self.of_ranks, [], self.last, self.skipped
        )
