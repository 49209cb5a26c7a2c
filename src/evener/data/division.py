"""Divides a global batch into micro-batches and each micro-batch into one slice for each rank, in integer arithmetic.

The samples that BatchNorm normalises together must not depend on the ranks. So a micro-batch is *global*: it is
``micro_batch`` consecutive positions, and each rank takes a slice of them. The division is a table. The sums of its
columns are given, the shares of the ranks, and so are the sums of its rows, the sizes of the micro-batches::

    size 10, shares [5, 3, 2], micro_batch 4        rank 0   rank 1   rank 2
                                    micro-batch 0   0 1      2        3           4
                                    micro-batch 1   4 5      6 7      -           4
                                    micro-batch 2   8        -        9           2
                                                    5        3        2

To fill the table, the positions of the batch are given to the ranks one by one. After every position each rank has its
exact proportion, rounded up or down. Such a sequence always exists. It is found by always choosing, of the ranks whose
next turn has begun, the one whose turn ends first (Steiner and Yeomans, "Level schedules for mixed-model, just-in-time
processes", 1993).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate

from evener.errors import ShareError

Table = tuple[tuple[range, ...], ...]


def divide(size: int, shares: Sequence[int], micro_batch: int | None = None) -> Table:
    """Returns the positions that each rank takes of each micro-batch, relative to the start of the batch.

    Args:
        size: Samples in the global batch.
        shares: Samples that each rank takes of the batch; they add up to ``size``.
        micro_batch: Samples over all ranks in one micro-batch; ``None`` makes the whole batch one micro-batch.

    Returns:
        ``table[k][rank]``: a range, empty if the rank has no sample in micro-batch ``k``. The ranges follow each
        other without gaps, in the order of micro-batches and then of ranks. In the first ``k`` micro-batches
        together, for any ``k``, the samples of a rank differ by less than one from its exact proportion.

    Raises:
        ShareError: If the shares are negative, not integers, or do not add up to ``size``.
        ValueError: If ``micro_batch`` is below 1.
    """
    if micro_batch is not None and micro_batch < 1:
        raise ValueError(f"a micro-batch needs at least one sample, not {micro_batch}")
    check_shares(shares, size, len(shares))
    return _table(size, tuple(shares), min(micro_batch or size, size) or 1)


def by_weights(size: int, weights: Sequence[float]) -> list[int]:
    """Divides ``size`` into integers in proportion to ``weights``, by largest remainder; lower ranks win ties.

    Raises:
        ShareError: If a weight is negative or not finite, or all are zero.
    """
    bad = [weight for weight in weights if not (math.isfinite(weight) and weight >= 0)]
    if bad or not any(weights):
        raise ShareError(
            f"weights {list(weights)} cannot divide a batch: give finite numbers, none below 0, not all 0"
        )
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    quotas = [size * weight / total for weight in exact]
    result = [math.floor(quota) for quota in quotas]
    neediest = sorted(range(len(quotas)), key=lambda rank: (result[rank] - quotas[rank], rank))
    for rank in neediest[: size - sum(result)]:
        result[rank] += 1
    return result


def own_slice(shares: Sequence[int], rank: int) -> slice:
    """Returns the samples of ``rank`` in a batch whose shares follow each other in the order of the ranks."""
    start = sum(shares[:rank])
    return slice(start, start + shares[rank])


def check_shares(shares: Sequence[int], size: int, world_size: int) -> None:
    """Raises ``ShareError`` unless ``shares`` are ``world_size`` integers of at least 0 that add up to ``size``."""
    if len(shares) != world_size:
        problem = f"are {len(shares)} for {world_size} ranks: give one for each rank"
    elif any(share != int(share) for share in shares):
        problem = (
            "are not all integers: round them so that they add up (evener.data.division.by_weights does)"
        )
    elif min(shares, default=0) < 0:
        rank = list(shares).index(min(shares))
        problem = f"hold the negative {shares[rank]} on rank {rank}: use 0 for a rank without samples"
    elif sum(shares) != size:
        problem = f"add up to {sum(shares)}, not to the {size} samples of the batch"
    else:
        return
    raise ShareError(f"shares {list(shares)} {problem}")


@lru_cache(maxsize=64)
def _table(size: int, shares: tuple[int, ...], micro_batch: int) -> Table:
    if micro_batch >= size:
        return (_row(0, shares),)
    labels = _deal(size, shares)
    rows = []
    for start in range(0, size, micro_batch):
        counts = [0] * len(shares)
        for rank in labels[start : start + micro_batch]:
            counts[rank] += 1
        rows.append(_row(start, counts))
    return tuple(rows)


def _row(start: int, counts: Sequence[int]) -> tuple[range, ...]:
    edges = list(accumulate(counts, initial=start))
    return tuple(map(range, edges[:-1], edges[1:]))


def _deal(size: int, shares: Sequence[int]) -> list[int]:
    """Returns the rank of each position (slot). Turn ``n`` of a rank lies in slots ``[n, n + 1) * size / share``."""
    turns = [0] * len(shares)
    waiting = [(0, rank) for rank, share in enumerate(shares) if share]  # (first slot of the turn, rank)
    heapify(waiting)
    ready: list[tuple[int, int]] = []  # (slot before which the turn ends, rank)
    labels = []
    for slot in range(size):
        while waiting and waiting[0][0] <= slot:
            _, rank = heappop(waiting)
            turns[rank] += 1
            heappush(ready, (-(-turns[rank] * size // shares[rank]), rank))
        _, rank = heappop(ready)
        labels.append(rank)
        heappush(waiting, (turns[rank] * size // shares[rank], rank))
    return labels
