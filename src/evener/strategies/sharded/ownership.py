"""Who owns which rows of which parameter, by integers alone.

Every rank owns a part of every parameter that has rows enough, so that all of them have something to sum and to update
at any moment. Rows do not divide evenly; what a rank got too little of one parameter it gets of the next::

    parts 2 : 1                rank 0     rank 1     rank 0 is short of, in elements
    weight  (5, 100)           rows 0-2   rows 3-4   33.3
    weight  (4, 30)            rows 0-3   -          -6.7
    bias    (20,)              rows 0-6   rows 7-19  -0.3

The longest rows come first, and the shorter ones make up for them: what is left in the end is about one of the shortest
rows, however few the longest were.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def divide_rows(tables: Sequence[tuple[int, int]], parts: Sequence[float]) -> list[tuple[range, ...]]:
    """For each table, given by its number of rows and the size of a row, the rows of every rank.

    Args:
        tables: One without rows is nobody's.
        parts: What each rank is to own of all sizes together; they add up to 1.

    Returns:
        For each table ranges in order of rank and without gaps, of which some may be empty.
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


def _rounded(wanted: Sequence[float], total: int) -> list[int]:
    """Whole numbers of that total, none negative, near the wanted ones: largest remainders get the rest."""
    positive = [max(0.0, want) for want in wanted]
    scaled = [want * total / sum(positive) for want in positive]
    counts = [int(want) for want in scaled]
    by_remainder = sorted(range(len(wanted)), key=lambda rank: counts[rank] - scaled[rank])
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    return counts


def chunks(rows: int, ranks: int) -> tuple[range, ...]:
    """As ``torch.chunk`` cuts them: the last ranks have fewer rows, or none."""
    most = -(-rows // ranks)
    cuts = [min(rank * most, rows) for rank in range(ranks + 1)]
    return tuple(map(range, cuts, cuts[1:]))
