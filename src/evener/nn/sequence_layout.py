"""How the positions of a sequence lie on the ranks of a group.

Under a causal mask a position attends to those before it, so that the last positions have the most work. In zigzag
order a sequence is cut into twice as many chunks as there are ranks, and each rank has one of the first and one of the
last, which together are as much work as any other's (Brandon et al., "Striped Attention", 2023, and the ring of Llama 3
balance so)::

    positions      0 1 2   3 4 5   6 7 8   9 10 11        two ranks
    zigzag         rank 0  rank 1  rank 1  rank 0         3 + 12 = 6 + 9 chunks' worth of work
    contiguous     rank 0  rank 0  rank 1  rank 1

Chunks are as equal as they can be, and empty where a sequence is shorter than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

ORDERS = ("zigzag", "contiguous")


def pieces(length: int, ranks: int, order: str) -> list[tuple[range, ...]]:
    """The positions of each rank, as ranges without gaps, in ascending order."""
    parts = ranks * (2 if order == "zigzag" else 1)
    chunks = list(
        map(range, *zip(*pairwise(length * part // parts for part in range(parts + 1)), strict=True))
    )
    return [
        (chunks[rank], chunks[-1 - rank]) if order == "zigzag" else (chunks[rank],) for rank in range(ranks)
    ]


@dataclass(frozen=True, eq=False)
class DividedSequence:
    """The sequences of a micro-batch, of which each rank of ``group`` has some positions.

    Attributes:
        group: The ranks; what is sent while the micro-batch is computed is sent here.
        length: Of the whole sequences, padding included.
        order: One of ``ORDERS``.
        method: How attention reaches the positions of other ranks.
        dim: The dimension of the positions in inputs and targets.
    """

    group: ProcessGroup
    length: int
    order: str
    method: str
    dim: int

    @property
    def rank(self) -> int:
        return self.group.rank()

    @cached_property
    def pieces(self) -> list[tuple[range, ...]]:
        """The positions of every rank."""
        return pieces(self.length, self.group.size(), self.order)

    @property
    def own(self) -> tuple[range, ...]:
        """The positions of this rank."""
        return self.pieces[self.rank]

    @cached_property
    def sizes(self) -> list[int]:
        """How many positions each rank has."""
        return [sum(map(len, piece)) for piece in self.pieces]

    @property
    def size(self) -> int:
        """How many positions this rank has."""
        return self.sizes[self.rank]

    def part(self, whole: Tensor, dim: int, rank: int | None = None) -> Tensor:
        """The piece of ``whole`` that a rank has, this one by default."""
        chunks = self.pieces[self.rank if rank is None else rank]
        return torch.cat([whole.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """(size,) int64: where each position of this rank's piece is in the whole."""
        return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in self.own])

    def in_order(self, x: Tensor, dim: int) -> Tensor:
        """``x``, which has the pieces of all ranks side by side, with the positions in ascending order."""
        chunks = [chunk for piece in self.pieces for chunk in piece]
        parts = torch.split(x, [len(chunk) for chunk in chunks], dim)
        return torch.cat([parts[place] for place in _ascending(chunks)], dim)

    def by_rank(self, x: Tensor, dim: int) -> list[Tensor]:
        """The inverse of :meth:`in_order`, a tensor for each rank."""
        return [self.part(x, dim, rank) for rank in range(self.group.size())]


def _ascending(chunks: Sequence[range]) -> list[int]:
    return sorted(range(len(chunks)), key=lambda place: chunks[place].start)
