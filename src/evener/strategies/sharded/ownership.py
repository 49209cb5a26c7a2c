"""Decides which rows of which parameter each rank owns. Works on their sizes alone.

Every rank owns a part of every parameter that has enough rows, so that all ranks have something to sum and to update at
any moment. Rows do not divide evenly. A rank that got too little of one parameter gets more of the next::

    parts 2 : 1                rank 0     rank 1     rank 0 is short of, in elements
    weight  (5, 100)           rows 0-2   rows 3-4   33.3
    weight  (4, 30)            rows 0-3   -          -6.7
    bias    (20,)              rows 0-6   rows 7-19  -0.3

Parameters with the longest rows come first, and shorter rows even out the difference. The remaining imbalance is about
one of the shortest rows, however few rows the first parameters have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from torch import Tensor

T = TypeVar("T", bound=Tensor)


def dim_of_rows(parameter: Tensor) -> int:
    """Returns the dimension along which a dense parameter is cut: the first with more than one row, so that a piece is
    contiguous."""
    return next((dim for dim, size in enumerate(parameter.shape) if size > 1), 0)


def rows_of_owners(dims: Mapping[T, int], parts: Sequence[float]) -> dict[T, tuple[range, ...]]:
    """Returns the rows that each rank owns of each parameter, given the dimension along which that is cut."""
    tables = [(p.shape[dim], p.nbytes // max(1, p.shape[dim])) for p, dim in dims.items()]
    return dict(zip(dims, divide_rows(tables, parts), strict=True))


def divide_rows(tables: Sequence[tuple[int, int]], parts: Sequence[float]) -> list[tuple[range, ...]]:
    """Returns the rows that each rank owns of each table.

    Args:
        tables: Number of rows and size of a row of each table. Nobody owns a table without rows.
        parts: Fraction of the total size that each rank is to own; they add up to 1.

    Returns:
        For each table one range per rank, in rank order and without gaps; some may be empty.
    """
    short = [0.0] * len(parts)
    found: dict[int, tuple[range, ...]] = {}
    for index in sorted(range(len(tables)), key=lambda index: -tables[index][1]):
        rows, size = tables[index]
        if not rows:
            found[index] = (range(0),) * len(parts)
            continue
        wanted = [part * rows + missing / size for part, missing in zip(parts, short, strict=True)]
        counts = _rounded(wanted, rows)
        short = [(want - count) * size for want, count in zip(wanted, counts, strict=True)]
        found[index] = tuple(map(range, *zip(*pairwise(accumulate(counts, initial=0)), strict=True)))
    return [found[index] for index in range(len(tables))]


def one_owner(rows: int, owner: int, ranks: int) -> tuple[range, ...]:
    """Returns ranges of which ``owner`` has all rows, and the other ranks have none."""
    return tuple(range(0 if rank <= owner else rows, rows if rank >= owner else 0) for rank in range(ranks))


def _rounded(wanted: Sequence[float], total: int) -> list[int]:
    """Rounds ``wanted`` to non-negative integers that add up to ``total``, by the largest remainders."""
    positive = [max(0.0, want) for want in wanted]
    scaled = [want * total / sum(positive) for want in positive]
    counts = [int(want) for want in scaled]
    by_remainder = sorted(range(len(wanted)), key=lambda rank: counts[rank] - scaled[rank])
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    return counts


def chunks(rows: int, ranks: int) -> tuple[range, ...]:
    """Cuts rows as ``torch.chunk`` does: the last ranks have fewer rows, or none."""
    most = -(-rows // ranks)
    cuts = [min(rank * most, rows) for rank in range(ranks + 1)]
    return tuple(map(range, cuts, cuts[1:]))
