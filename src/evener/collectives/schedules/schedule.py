"""An all-reduce as data: which rank sends which part of the buffer to whom, round after round.

Written as data, one algorithm can be validated, simulated for 65,536 ranks, drawn and executed by four
functions that know nothing of each other and nothing of the algorithm.

**What a round means.** The buffer is cut into chunks. Every transfer of a round reads the value that its
source held *before* the round; what arrives is applied afterwards, in the order in which the round lists it.
So a rank may send a chunk and receive it in the same round, two ranks may add to one chunk of a third, and
the order of addition (hence every bit of the result) is part of the data. A transfer from a rank to itself
moves nothing over any link.

**Why rounds come in stretches.** A ring of 65,536 ranks has 131,070 rounds of 65,536 transfers, 8.6e9 in all,
but only two kinds of them: a :class:`Stretch` is a number of rounds that load every link alike and differ
only in the chunks they move. A round is made when it is asked for, as columns of numbers.
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
    """Which ranks share a host; hosts may be of unequal size.

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
        """One host that holds all ranks."""
        return cls((tuple(range(world_size)),))

    @classmethod
    def of_hosts(cls, sizes: Sequence[int]) -> Topology:
        """Hosts with this many ranks each: ``of_hosts([2, 3])`` puts ranks 0 1 on one, 2 3 4 on another."""
        ends = np.cumsum(sizes).tolist()
        return cls(tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)))

    @cached_property
    def world_size(self) -> int:
        return sum(map(len, self.hosts))

    @cached_property
    def order(self) -> Ints:
        """All ranks host by host, shape [world_size]: neighbors in it share a host wherever they can."""
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
    """Chunks ``start`` to ``stop - 1`` of ``src``: ``dst`` adds them to its own if ``reduce``, or copies."""

    src: int
    dst: int
    start: int
    stop: int
    reduce: bool


@dataclass(frozen=True, eq=False)
class Round:
    """Transfers that happen at once, as columns of equal length."""

    src: Ints
    dst: Ints
    start: Ints
    stop: Ints
    reduce: Bools

    @classmethod
    def of(
        cls,
        src: npt.ArrayLike,
        dst: npt.ArrayLike,
        start: npt.ArrayLike,
        stop: npt.ArrayLike,
        reduce: npt.ArrayLike,
    ) -> Round:
        """A round of columns of any shapes that broadcast, listed in row-major order."""
        wide = np.broadcast_arrays(src, dst, start, stop, reduce)
        numbers = [column.ravel().astype(np.int64) for column in wide[:4]]
        return cls(numbers[0], numbers[1], numbers[2], numbers[3], wide[4].ravel().astype(np.bool_))

    @classmethod
    def together(cls, rounds: Sequence[Round]) -> Round:
        """The transfers of several rounds in one, in order."""
        columns = ("src", "dst", "start", "stop", "reduce")
        return cls(*(np.concatenate([getattr(part, name) for part in rounds]) for name in columns))

    def __len__(self) -> int:
        return len(self.src)

    def __iter__(self) -> Iterator[Transfer]:
        columns = (self.src, self.dst, self.start, self.stop, self.reduce)
        return map(Transfer._make, zip(*(column.tolist() for column in columns), strict=True))


@dataclass(frozen=True)
class Stretch:
    """``times`` rounds after each other that send the same numbers of bytes between the same ranks."""

    times: int
    round_at: Callable[[int], Round]
    """Round number ``index`` of the stretch, ``0 <= index < times``."""

    @classmethod
    def once(cls, round_: Round) -> Stretch:
        return cls(1, lambda index: round_)


class RankRound(NamedTuple):
    """What one rank does in a round."""

    sends: tuple[Transfer, ...]
    """To others; those to the same rank in the order in which it lists them too."""
    receives: tuple[Transfer, ...]
    """In the order to apply them. One with ``src == dst`` is local; it too reads from before the round."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """An all-reduce of one buffer over the ranks of a topology."""

    topology: Topology
    bounds: Floats
    """Where chunks begin and end as fractions of the buffer, from 0 to 1, shape [chunks + 1]."""
    stretches: tuple[Stretch, ...]

    @classmethod
    def of(cls, topology: Topology, bounds: Floats, stretches: Iterable[Stretch]) -> Schedule:
        return cls(topology, bounds, tuple(stretches))

    @property
    def chunks(self) -> int:
        return len(self.bounds) - 1

    def offsets(self, numel: int) -> list[int]:
        """Where chunks begin and end in a buffer of ``numel`` elements, the same on every rank.

        A chunk is empty where there are fewer elements than chunks.
        """
        return [int(offset) for offset in np.floor(self.bounds * numel)]

    def rounds(self) -> Iterator[Round]:
        """Every round in full. On many ranks these are many: what only costs needs ``stretches``."""
        return (stretch.round_at(index) for stretch in self.stretches for index in range(stretch.times))

    def for_rank(self, rank: int) -> list[RankRound]:
        """The rounds as one rank sees them, idle ones included."""
        return [_seen_by(rank, round_) for round_ in self.rounds()]


def _seen_by(rank: int, round_: Round) -> RankRound:
    mine = np.flatnonzero((round_.src == rank) | (round_.dst == rank))
    transfers = list(
        Round(round_.src[mine], round_.dst[mine], round_.start[mine], round_.stop[mine], round_.reduce[mine])
    )
    sends = tuple(t for t in transfers if t.src == rank != t.dst)
    return RankRound(sends, tuple(t for t in transfers if t.dst == rank))


class Algorithm(Protocol):
    """Makes the schedule of an all-reduce: no tensors, no groups."""

    def __call__(self, topology: Topology, segments: int = 1) -> Schedule:
        """The schedule over all ranks of ``topology``.

        Args:
            topology: The ranks and their hosts.
            segments: Into how many parts a pipeline cuts what flows through it, at least 1. More of them keep
                more links busy and pay more latencies; an algorithm that is no pipeline ignores it.
        """
