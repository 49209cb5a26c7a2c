"""Compiles a schedule into a program: the steps of one rank for a buffer of a given length, reused in every call.

A schedule names chunks; messages are ranges of elements. For each round of a rank, the program holds the ranges to send
and to receive. An arriving range is received directly into its place, or first into scratch memory if it is added, or
if the round still sends from that place: sends must read the values from *before* the round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from evener.collectives.schedules.schedule import RankRound, Schedule, Transfer


class ElementRange(NamedTuple):
    """Elements ``start`` to ``stop - 1`` of the buffer."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: ElementRange) -> bool:
        return self.start < other.stop and other.start < self.stop


class Arrival(NamedTuple):
    """A message to receive from ``peer``, which is added to or copied into ``where``."""

    peer: int
    where: ElementRange
    reduce: bool
    scratch: ElementRange | None
    """The place in scratch memory where it is received; None if it is received directly into ``where``."""


class ProgramRound(NamedTuple):
    """One round of one rank. Idle rounds are included, so that all ranks have the same number of rounds."""

    sends: tuple[tuple[int, ElementRange], ...]
    """(peer, range) of each send."""
    arrivals: tuple[Arrival, ...]
    """Arrivals in the order in which to apply them; one whose ``peer`` is the rank itself is a local copy."""


class Program(NamedTuple):
    """All rounds of one rank."""

    rounds: tuple[ProgramRound, ...]
    scratch: int
    """Elements of scratch memory that are needed: the maximum over the rounds."""


def compile_program(schedule: Schedule, rank: int, numel: int) -> Program:
    """Returns the program of ``rank`` for a buffer of ``numel`` elements. Empty messages are left out on both sides."""
    offsets = schedule.offsets(numel)
    rounds = tuple(_program_round(rank, rank_round, offsets) for rank_round in schedule.for_rank(rank))
    return Program(rounds, max(map(_scratch_needed, rounds), default=0))


def _scratch_needed(program_round: ProgramRound) -> int:
    return sum(arrival.scratch.length for arrival in program_round.arrivals if arrival.scratch)


def _ranges(transfers: Iterable[Transfer], offsets: Sequence[int]) -> list[tuple[Transfer, ElementRange]]:
    ranges = [(t, ElementRange(offsets[t.start], offsets[t.stop])) for t in transfers]
    return [(transfer, where) for transfer, where in ranges if where.length]


def _program_round(rank: int, rank_round: RankRound, offsets: Sequence[int]) -> ProgramRound:
    sends = [(transfer.dst, what) for transfer, what in _ranges(rank_round.sends, offsets)]
    receives = _ranges(rank_round.receives, offsets)
    sent = [what for _, what in sends] + [what for transfer, what in receives if transfer.src == rank]
    arrivals, used = [], 0
    for index, (transfer, where) in enumerate(receives):
        others = [other for i, (_, other) in enumerate(receives) if i != index]
        in_place = not transfer.reduce and transfer.src != rank and not _touches(where, sent + others)
        scratch = None if in_place else ElementRange(used, used + where.length)
        used += where.length if scratch else 0
        arrivals.append(Arrival(transfer.src, where, transfer.reduce, scratch))
    return ProgramRound(tuple(sends), tuple(arrivals))


def _touches(where: ElementRange, others: Iterable[ElementRange]) -> bool:
    return any(where.overlaps(other) for other in others)
