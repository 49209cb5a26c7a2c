"""Schedule: an all-reduce as data. It says which rank sends which part of the buffer to which rank in each round.

An algorithm in this form can be validated, simulated for 65,536 ranks, drawn and executed, by four functions that
are independent of each other and of the algorithm.

**Meaning of a round.** The buffer is cut into chunks. Every transfer of a round reads the value that its source
held *before* the round. Arriving data is applied afterwards, in the order in which the round lists it. So a rank may
send a chunk and receive it in the same round, two ranks may add to one chunk of a third, and the order of addition
(and so every bit of the result) is part of the data. A transfer from a rank to itself uses no link.

**Reason for stretches.** A ring of 65,536 ranks has 131,070 rounds of 65,536 transfers, 8.6e9 in all, but only two
kinds of rounds. A :class:`Stretch` is a number of rounds that load every link alike and differ only in the chunks
that they move. Rounds are created on demand, as columns of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Topology:
    """The ranks of each host. Hosts may be of unequal size.

    Raises:
        ValueError: If a host is empty, or the ranks are not 0 to ``world_size - 1``, each once.
    """

    hosts: tuple[tuple[int, ...], ...]
    """The ranks of each host, in the order in which a ring visits them."""

    def __post_init__(self) -> None:
        ranks = sorted(rank for host in self.hosts for rank in host)
        if not ranks or not all(self.hosts) or ranks != list(range(len(ranks))):
            raise ValueError(f"hosts must hold the ranks 0 to world_size - 1 once each, got {self.hosts}")

    @classmethod
    def flat(cls, world_size: int) -> Topology:
        """Returns a topology of one host that holds all ranks."""
        return cls((tuple(range(world_size)),))

    @classmethod
    def of_hosts(cls, sizes: Sequence[int]) -> Topology:
        """Returns hosts of the given sizes: ``of_hosts([2, 3])`` has ranks 0 1 on one host, 2 3 4 on another."""
        ends = np.cumsum(sizes).tolist()
        return cls(tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)))

    @cached_property
    def world_size(self) -> int:
        return sum(map(len, self.hosts))

    @cached_property
    def order(self) -> Ints:
        """All ranks, host by host, shape [world_size]."""
        return np.concatenate([np.asarray(host, dtype=np.int64) for host in self.hosts])

    @cached_property
    def host_index(self) -> Ints:
        """The host of each rank, shape [world_size]."""
        index = np.empty(self.world_size, dtype=np.int64)
        index[self.order] = np.repeat(np.arange(len(self.hosts)), [len(host) for host in self.hosts])
        return index

    @cached_property
    def place(self) -> Ints:
        """The place of each rank within its host, shape [world_size]."""
        place = np.empty(self.world_size, dtype=np.int64)
        place[self.order] = np.concatenate([np.arange(len(host)) for host in self.hosts])
        return place

    def host_of(self, rank: int) -> int:
        return int(self.host_index[rank])


class Transfer(NamedTuple):
    """Sends chunks ``start`` to ``stop - 1`` from ``src`` to ``dst``, which adds them if ``reduce``, else copies."""

    src: int
    dst: int
    start: int
    stop: int
    reduce: bool


@dataclass(frozen=True, eq=False)
class Round:
    """Transfers that happen at the same time, as columns of equal length."""

    src: Ints
    dst: Ints
    start: Ints
    stop: Ints
    reduce: Bools

    @classmethod
    def from_columns(
        cls,
        src: npt.ArrayLike,
        dst: npt.ArrayLike,
        start: npt.ArrayLike,
        stop: npt.ArrayLike,
        reduce: npt.ArrayLike,
    ) -> Round:
        """Returns a round of columns of shapes that broadcast; transfers are listed in row-major order."""
        wide = np.broadcast_arrays(src, dst, start, stop, reduce)
        numbers = [column.ravel().astype(np.int64) for column in wide[:4]]
        return cls(numbers[0], numbers[1], numbers[2], numbers[3], wide[4].ravel().astype(np.bool_))

    @classmethod
    def together(cls, rounds: Sequence[Round]) -> Round:
        """Joins several rounds into one with all their transfers, in order."""
        columns = ("src", "dst", "start", "stop", "reduce")
        return cls(*(np.concatenate([getattr(part, name) for part in rounds]) for name in columns))

    def __len__(self) -> int:
        return len(self.src)

    def __iter__(self) -> Iterator[Transfer]:
        columns = (self.src, self.dst, self.start, self.stop, self.reduce)
        return map(Transfer._make, zip(*(column.tolist() for column in columns), strict=True))


@dataclass(frozen=True)
class Stretch:
    """A sequence of ``times`` rounds that send the same numbers of bytes between the same ranks."""

    times: int
    round_at: Callable[[int], Round]
    """Returns round number ``index`` of the stretch, ``0 <= index < times``."""

    @classmethod
    def once(cls, round_: Round) -> Stretch:
        return cls(1, lambda index: round_)


class RankRound(NamedTuple):
    """The transfers of one rank in a round."""

    sends: tuple[Transfer, ...]
    """Transfers to other ranks. Those to the same rank are in the order in which that rank lists its receives."""
    receives: tuple[Transfer, ...]
    """Transfers in the order in which to apply them. ``src == dst`` is a local one, of the value before the round."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """An all-reduce of one buffer over the ranks of a topology."""

    topology: Topology
    bounds: Floats
    """Bounds of the chunks as fractions of the buffer, from 0 to 1, shape [chunks + 1]."""
    stretches: tuple[Stretch, ...]

    @classmethod
    def from_stretches(cls, topology: Topology, bounds: Floats, stretches: Iterable[Stretch]) -> Schedule:
        return cls(topology, bounds, tuple(stretches))

    @property
    def chunks(self) -> int:
        return len(self.bounds) - 1

    def offsets(self, numel: int) -> list[int]:
        """Returns the bounds of the chunks in a buffer of ``numel`` elements, the same on every rank.

        Some chunks are empty if there are fewer elements than chunks.
        """
        return [int(offset) for offset in np.floor(self.bounds * numel)]

    def rounds(self) -> Iterator[Round]:
        """Yields every round. With many ranks these are very many: to compute costs only, use ``stretches``."""
        return (stretch.round_at(index) for stretch in self.stretches for index in range(stretch.times))

    def for_rank(self, rank: int) -> list[RankRound]:
        """Returns the rounds of one rank, including idle ones."""
        return [_seen_by(rank, round_) for round_ in self.rounds()]


def _seen_by(rank: int, round_: Round) -> RankRound:
    mine = np.flatnonzero((round_.src == rank) | (round_.dst == rank))
    transfers = list(
        Round(round_.src[mine], round_.dst[mine], round_.start[mine], round_.stop[mine], round_.reduce[mine])
    )
    sends = tuple(t for t in transfers if t.src == rank != t.dst)
    return RankRound(sends, tuple(t for t in transfers if t.dst == rank))


class Algorithm(Protocol):
    """Makes the schedule of an all-reduce, without tensors or process groups."""

    def __call__(self, topology: Topology, segments: int = 1) -> Schedule:
        """Returns the schedule over all ranks of ``topology``.

        Args:
            topology: The ranks and their hosts.
            segments: Number of parts into which a pipelined algorithm cuts its data, at least 1. More segments keep
                more links busy and pay more latencies. Other algorithms ignore it.
        """
