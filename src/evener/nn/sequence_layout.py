"""The division of a sequence's positions over the ranks of a group.

Under a causal mask a position attends to the positions before it, so later positions cost more work. In the order
``zigzag`` a sequence is cut into twice as many chunks as there are ranks. Each rank has one chunk from the beginning
and one from the end, so that all ranks have equal work (as in Brandon et al., "Striped Attention", 2023, and in the
ring attention of Llama 3)::

    positions      0 1 2   3 4 5   6 7 8   9 10 11        two ranks
    zigzag         rank 0  rank 1  rank 1  rank 0         3 + 12 = 6 + 9 chunks' worth of work
    contiguous     rank 0  rank 0  rank 1  rank 1

Lengths of chunks differ by at most 1. Chunks may be empty if the sequence is shorter than the number of chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

ORDERS = ("zigzag", "contiguous")


def pieces(length: int, ranks: int, order: str) -> list[tuple[range, ...]]:
    """Returns the positions of each rank, as ranges in ascending order."""
    parts = ranks * (2 if order == "zigzag" else 1)
    chunks = list(
        map(range, *zip(*pairwise(length * part // parts for part in range(parts + 1)), strict=True))
    )
    return [
        (chunks[rank], chunks[-1 - rank]) if order == "zigzag" else (chunks[rank],) for rank in range(ranks)
    ]


@dataclass(frozen=True, eq=False)
class DividedSequence:
    """The division of the positions of a micro-batch's sequences over the ranks of ``group``.

    Attributes:
        group: The ranks. Attention and other layers communicate over this group.
        length: Length of the whole sequences, including padding.
        order: One of ``ORDERS``.
        method: How attention reaches the positions of other ranks, such as "ring" or "ulysses".
        dim: The dimension of the positions in inputs and targets.
        square_masks: The sizes of the masks of queries and keys that attention was given. In longer sequences such a
            mask may follow another rule.
    """

    group: ProcessGroup
    length: int
    order: str
    method: str
    dim: int
    square_masks: set[int] = field(default_factory=set)

    @property
    def rank(self) -> int:
        return self.group.rank()

    @cached_property
    def pieces(self) -> list[tuple[range, ...]]:
        """The positions of every rank."""
        return pieces(self.length, self.group.size(), self.order)

    @property
    def local_positions(self) -> tuple[range, ...]:
        """The positions of this rank."""
        return self.pieces[self.rank]

    @cached_property
    def sizes(self) -> list[int]:
        """The number of positions of each rank."""
        return [sum(map(len, piece)) for piece in self.pieces]

    @property
    def size(self) -> int:
        """The number of positions of this rank."""
        return self.sizes[self.rank]

    def part(self, whole: Tensor, dim: int, rank: int | None = None) -> Tensor:
        """Cuts a rank's positions out of ``whole`` along ``dim``; this rank's by default."""
        chunks = self.pieces[self.rank if rank is None else rank]
        return torch.cat([whole.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Returns the numbers of this rank's positions in the whole sequence: (size,) int64."""
        return torch.cat(
            [torch.arange(chunk.start, chunk.stop, device=device) for chunk in self.local_positions]
        )

    def in_order(self, x: Tensor, dim: int) -> Tensor:
        """Sorts the positions of ``x`` along ``dim``. ``x`` has the pieces of all ranks, in order of rank."""
        chunks = [chunk for piece in self.pieces for chunk in piece]
        parts = torch.split(x, [len(chunk) for chunk in chunks], dim)
        ascending = sorted(range(len(chunks)), key=lambda place: chunks[place].start)
        return torch.cat([parts[place] for place in ascending], dim)

    def by_rank(self, x: Tensor, dim: int) -> list[Tensor]:
        """Cuts a whole ``x`` into a tensor for each rank: the inverse of :meth:`in_order`."""
        return [self.part(x, dim, rank) for rank in range(self.group.size())]
