"""What one rank has to do for a schedule on a buffer of a given length, worked out once and used at every call.

A schedule speaks of chunks; messages are ranges of elements. For each round of a rank, the program holds the ranges to
send, those to receive, and where an arriving range goes: straight to its place, or first to scratch memory if its
place is being read by a send of the round, which sends the values from *before* it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from evener.collectives.schedules.schedule import RankRound, Schedule, Transfer


class Range(NamedTuple):
    """Elements ``start`` to ``stop - 1`` of the buffer."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: Range) -> bool:
        return self.start < other.stop and other.start < self.stop


class Arrival(NamedTuple):
    """A message to receive from ``peer`` and to apply to ``where``."""

    peer: int
    where: Range
    reduce: bool
    scratch: Range | None
    """Where in scratch memory it waits to be applied; None if it may be received in its place."""


class Turn(NamedTuple):
    """One round of one rank; idle ones too, so that all ranks have equally many."""

    sends: tuple[tuple[int, Range], ...]
    """(peer, what)."""
    arrivals: tuple[Arrival, ...]
    """In the order in which to apply them; from this rank itself where ``peer`` is the rank."""


class Program(NamedTuple):
    """All that one rank does."""

    turns: tuple[Turn, ...]
    scratch: int
    """Elements of scratch memory that the turn with the most needs."""


def compile_program(schedule: Schedule, rank: int, numel: int) -> Program:
    """The program of ``rank`` for a buffer of ``numel`` elements; empty messages are left out on both sides."""
    offsets = schedule.offsets(numel)
    turns = tuple(_turn(rank, rank_round, offsets) for rank_round in schedule.for_rank(rank))
    return Program(turns, max(map(_scratch_needed, turns), default=0))


def _scratch_needed(turn: Turn) -> int:
    return sum(arrival.scratch.length for arrival in turn.arrivals if arrival.scratch)


def _ranges(transfers: Iterable[Transfer], offsets: Sequence[int]) -> list[tuple[Transfer, Range]]:
    ranges = [(t, Range(offsets[t.start], offsets[t.stop])) for t in transfers]
    return [(transfer, where) for transfer, where in ranges if where.length]


def _turn(rank: int, rank_round: RankRound, offsets: Sequence[int]) -> Turn:
    sends = [(transfer.dst, what) for transfer, what in _ranges(rank_round.sends, offsets)]
    receives = _ranges(rank_round.receives, offsets)
    sent = [what for _, what in sends] + [what for transfer, what in receives if transfer.src == rank]
    arrivals, used = [], 0
    for index, (transfer, where) in enumerate(receives):
        others = [other for i, (_, other) in enumerate(receives) if i != index]
        in_place = not transfer.reduce and transfer.src != rank and not _touches(where, sent + others)
        scratch = None if in_place else Range(used, used + where.length)
        used += where.length if scratch else 0
        arrivals.append(Arrival(transfer.src, where, transfer.reduce, scratch))
    return Turn(tuple(sends), tuple(arrivals))


def _touches(where: Range, others: Iterable[Range]) -> bool:
    return any(where.overlaps(other) for other in others)
