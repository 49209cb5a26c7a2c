"""Proves that a schedule is an all-reduce, by running it symbolically: each value is the expression that made it.

It compares sums as expressions and not as sets of ranks, because floating-point addition is not associative: ranks
hold the same bits only if they added in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evener.collectives.schedules.schedule import Floats, Ints, Round, Schedule, Stretch, Transfer


def validate(schedule: Schedule) -> None:
    """Checks a whole schedule. The time grows with the number of transfers times the chunks that they move.

    Raises:
        ValueError: If a transfer names a rank or chunk that does not exist; a transfer overwrites a chunk that
            another transfer of the round has written; a rank adds a contribution twice; the rounds of a stretch do
            not move the same bytes; or at the end a rank lacks a contribution or has added in another order than
            rank 0. It names the round, rank and chunk.
    """
    _Replay(schedule).run()


class _Replay:
    """Runs a schedule symbolically. Equal expressions have the same number; ``ranks[number]`` has a bit for each
    rank whose contribution is in it."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.world_size = schedule.topology.world_size
        self.sums: dict[tuple[int, int], int] = {}
        self.ranks = [1 << rank for rank in range(self.world_size)]
        self.held = [[rank] * schedule.chunks for rank in range(self.world_size)]

    def run(self) -> None:
        bounds = self.schedule.bounds
        if bounds[0] != 0 or bounds[-1] != 1 or (np.diff(bounds) <= 0).any():
            raise ValueError(f"chunks must divide the buffer from 0 to 1, got bounds {bounds}")
        for number, round_ in enumerate(self.schedule.rounds()):
            self._check_range(number, round_)
        for stretch in self.schedule.stretches:
            _check_alike(stretch, self.schedule.bounds)
        for number, round_ in enumerate(self.schedule.rounds()):
            self._replay_round(number, list(round_))
        self._check_result()

    def _replay_round(self, number: int, transfers: Sequence[Transfer]) -> None:
        read = [self.held[t.src][t.start : t.stop] for t in transfers]
        touched: set[tuple[int, int]] = set()
        for transfer, values in zip(transfers, read, strict=True):
            for chunk, value in zip(range(transfer.start, transfer.stop), values, strict=True):
                self._apply(f"round {number}: {transfer}", transfer, chunk, value, touched)

    def _apply(
        self, where: str, transfer: Transfer, chunk: int, value: int, touched: set[tuple[int, int]]
    ) -> None:
        place = (transfer.dst, chunk)
        if transfer.reduce:
            value = self._add(where, chunk, self.held[transfer.dst][chunk], value)
        elif place in touched:
            raise ValueError(f"{where} overwrites chunk {chunk}, which another transfer of the round brought")
        self.held[transfer.dst][chunk] = value
        touched.add(place)

    def _add(self, where: str, chunk: int, mine: int, arrived: int) -> int:
        twice = self.ranks[mine] & self.ranks[arrived]
        if twice:
            raise ValueError(f"{where} adds the contribution of rank {_first(twice)} to chunk {chunk} twice")
        if (mine, arrived) not in self.sums:
            self.sums[mine, arrived] = len(self.ranks)
            self.ranks.append(self.ranks[mine] | self.ranks[arrived])
        return self.sums[mine, arrived]

    def _check_range(self, number: int, round_: Round) -> None:
        lowest, highest = np.minimum(round_.src, round_.dst), np.maximum(round_.src, round_.dst)
        ranks_exist = (lowest >= 0) & (highest < self.world_size)
        chunks_exist = (round_.start >= 0) & (round_.stop <= self.schedule.chunks)
        good = ranks_exist & chunks_exist & (round_.start < round_.stop)
        if not good.all():
            transfer = list(round_)[int(np.argmin(good))]
            raise ValueError(
                f"round {number}: {transfer} names a rank or chunk that does not exist: there are "
                f"{self.world_size} ranks and {self.schedule.chunks} chunks"
            )

    def _check_result(self) -> None:
        for rank, values in enumerate(self.held):
            for chunk, value in enumerate(values):
                missing = ((1 << self.world_size) - 1) & ~self.ranks[value]
                if missing:
                    source = _first(missing)
                    raise ValueError(
                        f"rank {rank} ends without chunk {chunk} of rank {source}'s contribution"
                    )
                if value != self.held[0][chunk]:
                    raise ValueError(f"ranks 0 and {rank} add chunk {chunk} in different orders")


def _first(ranks: int) -> int:
    return (ranks & -ranks).bit_length() - 1


def _check_alike(stretch: Stretch, bounds: Floats) -> None:
    first_pairs, first_parts = _load(stretch.round_at(0), bounds)
    for index in range(1, stretch.times):
        pairs, parts = _load(stretch.round_at(index), bounds)
        if not np.array_equal(pairs, first_pairs) or not np.allclose(parts, first_parts, rtol=0, atol=1e-9):
            raise ValueError(f"round {index} of {stretch} does not load the links as its round 0 does")


def _load(round_: Round, bounds: Floats) -> tuple[Ints, Floats]:
    """Returns the sources, destinations and kinds of the transfers, and the fraction of the buffer that each moves."""
    pairs = np.stack([round_.src, round_.dst, round_.reduce.astype(np.int64)])
    return pairs, bounds[round_.stop] - bounds[round_.start]
