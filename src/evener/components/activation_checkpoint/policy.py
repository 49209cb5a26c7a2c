"""Which blocks are computed again, so that a step fits a budget at the least time.

A step is a row of moments. At each there is some memory in any case, that of a block just computed again among it, and
what blocks keep whose backward has not come yet. With the blocks in the order of their forward, these are the first
few, and all of them when the loss is computed::

    in any case   ▁▂▃▃▃▃▆▇▆▆▅▅▅▅▄▄▄▂▁
    depth         0 1 2 3 4 4 3 2 1 0         blocks 0 to depth - 1 may be keeping something

So there is one limit for each depth, on the sum of what the blocks before it keep. That is a knapsack of nested limits,
each block with a few ways of which one is chosen, and dynamic programming from the first block to the last solves it:
of two beginnings that keep as many bytes, or one fewer and in less time, only one can be part of the best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

KEPT, KEPT_PRODUCTS, AGAIN = "kept", "products", "again"
"""How a block may be computed, by what it holds until its backward."""
BEGINNINGS = 4096
"""So many are looked at, for each block. Of more, some that differ little are left out."""


@dataclass(frozen=True)
class Way:
    """One way to compute a block."""

    name: str
    nbytes: int
    """Held from its forward to its backward, at most."""
    seconds: float
    """Added to a step."""


class _Beginning(NamedTuple):
    nbytes: int
    seconds: float
    way: int
    before: _Beginning | None


def choose(blocks: Sequence[Sequence[Way]], rooms: Sequence[int]) -> tuple[int, ...] | None:
    """The way of each block, by its place among the block's, that adds the least time in all.

    Exact as long as no more than :data:`BEGINNINGS` are worth looking at. Beyond, bytes are taken for up to 1/4096 of
    the largest room more than they are, once for each block: what is found always fits, and adds no more time than the
    best does that fits into rooms smaller by as much.

    Args:
        blocks: The ways of each, in order.
        rooms: One more than blocks: what all blocks before the first, second, ..., and all may keep in bytes.

    Returns:
        None if nothing fits.

    Raises:
        ValueError: If there are not as many rooms.
    """
    if len(rooms) != len(blocks) + 1:
        raise ValueError(f"{len(rooms)} rooms for {len(blocks)} blocks; there must be one more")
    beginnings = [_Beginning(0, 0.0, 0, None)] if rooms[0] >= 0 else []
    grid = max(1, max(rooms) // BEGINNINGS)
    for ways, room in zip(blocks, rooms[1:], strict=True):
        longer = [
            _Beginning(one.nbytes + way.nbytes, one.seconds + way.seconds, place, one)
            for one in beginnings
            for place, way in enumerate(ways)
            if one.nbytes + way.nbytes <= room
        ]
        beginnings = _worth_it(longer)
        if len(beginnings) > BEGINNINGS:
            upwards = [one._replace(nbytes=-(-one.nbytes // grid) * grid) for one in beginnings]
            beginnings = _worth_it([one for one in upwards if one.nbytes <= room])
    return _ways_of(min(beginnings, key=lambda one: one.seconds)) if beginnings else None


def _worth_it(beginnings: list[_Beginning]) -> list[_Beginning]:
    """Those than which no other holds as little and takes as little time."""
    found: list[_Beginning] = []
    for one in sorted(beginnings, key=lambda each: (each.nbytes, each.seconds)):
        if not found or one.seconds < found[-1].seconds:
            found.append(one)
    return found


def _ways_of(last: _Beginning) -> tuple[int, ...]:
    ways, one = [], last
    while one.before is not None:
        ways.append(one.way)
        one = one.before
    return tuple(reversed(ways))


# From what ranks have measured


@dataclass(frozen=True)
class Moment:
    """In a step in which every block is computed again."""

    nbytes: int
    """Held then."""
    waiting: tuple[str, ...]
    """Blocks that were computed, and whose backward has not come."""


@dataclass(frozen=True)
class Measured:
    """What one rank measured."""

    blocks: Mapping[str, tuple[Way, ...]]
    """In the order in which they are computed; the first way keeps all, the last nothing."""
    moments: tuple[Moment, ...]
    kept_peak: int
    """Bytes of the peak if all blocks were kept."""
    seconds: float
    """Of a step."""

    @property
    def least(self) -> int:
        """Bytes of the peak if all are computed again."""
        return max(moment.nbytes for moment in self.moments)

    def peak(self, ways: Mapping[str, Way]) -> int:
        """Bytes of the peak if blocks are computed in these ways, at most."""
        return max(m.nbytes + sum(ways[name].nbytes for name in set(m.waiting)) for m in self.moments)

    def times(self, ways: Mapping[str, Way]) -> float:
        """How many times as long a step takes as with all blocks kept, about."""
        kept = self.seconds - sum(each[-1].seconds for each in self.blocks.values())
        return 1 + sum(way.seconds for way in ways.values()) / max(kept, 1e-9)


def chosen(ranks: Sequence[Measured], budgets: Sequence[int]) -> dict[str, Way] | None:
    """The way of each block, the same for all of ``ranks``, with which each is within its budget in bytes.

    What one of them sends in a block's forward, the others get: so they compute the
    same ones again. Where ranks differ, a block holds and takes what it does where that is the most.

    Returns:
        None if not all can be.
    """
    order = list(dict.fromkeys(name for rank in ranks for name in rank.blocks))
    blocks = [_alike([rank.blocks[name] for rank in ranks if name in rank.blocks]) for name in order]
    rooms = [min(each) for each in zip(*map(_rooms, ranks, budgets, [order] * len(ranks)), strict=True)]
    found = choose(blocks, rooms)
    if found is None:
        return None
    return {name: ways[place] for name, ways, place in zip(order, blocks, found, strict=True)}


def _alike(of_ranks: Sequence[tuple[Way, ...]]) -> list[Way]:
    """The ways that all ranks have."""
    common = [way.name for way in of_ranks[0] if all(way.name in {w.name for w in ways} for ways in of_ranks)]
    by_name = [{way.name: way for way in ways} for ways in of_ranks]
    return [
        Way(name, max(each[name].nbytes for each in by_name), max(each[name].seconds for each in by_name))
        for name in common
    ]


def _rooms(rank: Measured, budget: int, order: Sequence[str]) -> list[int]:
    """What the first blocks may keep together. A moment at which blocks wait that are not the first ones counts as one
    at which all up to the last of them do."""
    places = {name: place for place, name in enumerate(order)}
    rooms = [budget] * (len(order) + 1)
    for moment in rank.moments:
        depth = 1 + max((places[name] for name in moment.waiting), default=-1)
        rooms[depth] = min(rooms[depth], budget - moment.nbytes)
    return rooms
