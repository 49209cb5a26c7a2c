"""Computes the shares with which the slowest rank finishes soonest: the exact integer optimum. Also parses shares.

``solve`` minimizes ``max_i t_i(n_i)`` over integers with ``sum n_i = batch_size`` and ``0 <= n_i <= cap_i``,
for any non-decreasing times. It is a greedy: give the next sample to the rank whose *resulting* time is
least. With the times ``t_0(n) = 1 + n`` and ``t_1(n) = 3 n`` (ties go to the lower rank)::

    sample    t_0 if taken    t_1 if taken    goes to    shares
       1           2               3          rank 0      1 0
       2           3               3          rank 0      2 0
       3           4               3          rank 1      2 1
       4           4               6          rank 0      3 1

Why that is optimal: as the times do not decrease, samples are given in the order of their resulting times.
Before one is given at a time above ``T``, every rank holds all that it can finish within ``T``; so no
division of more samples ends at ``T`` or earlier.

Shares in multiples of a number are the same greedy in larger steps. The remainder of the batch goes, as a whole, to
the one rank that ends soonest with it. This is the optimum over all divisions in which one rank holds the remainder
beyond a multiple and all others hold multiples: if a time ``T`` suffices for the batch, then either the ranks can
finish one more multiple than the greedy gave within ``T``, so that some rank has room for the smaller remainder, or
the greedy gave each exactly what it can finish, and the rank that holds the remainder in that division can take it
here."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from evener.errors import ShareError

Times = Sequence[Callable[[int], float]]
"""For each rank, seconds as a non-decreasing function of the number of samples."""

HEAD_START = 512
"""With more steps than this, skipping most steps of the greedy by bisection is cheaper."""


def solve(
    times: Times, batch_size: int, max_shares: Sequence[int | None] | None = None, share_multiple_of: int = 1
) -> list[int]:
    """Returns the shares, by rank, with which the slowest rank finishes soonest.

    The cost is O(steps log ranks) for ``steps = batch_size / share_multiple_of``, and for many steps
    O(ranks log(steps)) evaluations of times in each of some 30 rounds of bisection, with the same result.

    Args:
        times: One non-decreasing function for each rank.
        batch_size: Sum of the shares.
        max_shares: The most samples that each rank can hold; None, for all or for one, is no limit.
        share_multiple_of: Shares are multiples of it, except one share, which also holds the remainder.

    Raises:
        ShareError: If the ranks cannot hold the batch, or ``batch_size`` or ``share_multiple_of`` is too small.
    """
    if share_multiple_of < 1 or batch_size < 0:
        raise ShareError(
            f"batch size {batch_size} and share_multiple_of {share_multiple_of}: they must be at least 0 and 1"
        )
    limits = _limits(len(times), batch_size, max_shares)
    steps, remainder = divmod(batch_size, share_multiple_of)
    room = [limit // share_multiple_of for limit in limits]
    if sum(room) < steps:
        raise too_small(limits, batch_size, share_multiple_of)
    taken = _head_start(times, steps, room, share_multiple_of) if steps > HEAD_START else [0] * len(times)
    _give(times, taken, steps - sum(taken), room, share_multiple_of)
    shares = [units * share_multiple_of for units in taken]
    if remainder:
        _give_remainder(times, shares, remainder, limits, share_multiple_of)
    return shares


def validate_shares(
    shares: Sequence[int], batch_size: int, world_size: int, max_shares: Sequence[int | None] | None = None
) -> None:
    """Raises ShareError unless each rank has a share within its cap and the shares add up to ``batch_size``."""
    if len(shares) != world_size:
        raise ShareError(
            f"{len(shares)} shares {list(shares)} for {world_size} ranks: give one for each rank"
        )
    limits = _limits(world_size, batch_size, max_shares)
    for rank, (share, limit) in enumerate(zip(shares, limits, strict=True)):
        if not 0 <= share <= limit:
            raise ShareError(f"rank {rank} has a share of {share} samples; it must be from 0 to {limit}")
    if sum(shares) != batch_size:
        raise ShareError(
            f"shares {list(shares)} add up to {sum(shares)}, but the batch has {batch_size} samples"
        )


def parse_shares(text: str, world_size: int) -> list[float]:
    """Parses ``"0.5,0.3,0.2"`` (fractions) or ``"3,2,1"`` (ratios). Returns weights that add up to 1.

    If no number is above 1 and some are not whole, the numbers are fractions of the batch and must add up to 1.

    Raises:
        ShareError: If the text is not a list of ``world_size`` weights.
    """
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        raise ShareError(
            f"shares {text!r}: write one number for each rank, such as 3,2,1 or 0.5,0.3,0.2"
        ) from None
    fractions = max(weights) <= 1 and any(
        weight != int(weight) for weight in weights if math.isfinite(weight)
    )
    if fractions and abs(sum(weights) - 1) > 1e-6:
        raise ShareError(
            f"the fractions {text} add up to {sum(weights):g}; make it 1, or write ratios such as 3,2,1"
        )
    return normalize_weights(weights, world_size)


def parse_max_shares(text: str | None, world_size: int) -> list[int | None] | None:
    """Parses the most samples of each rank, such as ``"64,-,32"``, where ``-`` is no limit. Returns None for None.

    Raises:
        ShareError: If the text is not a list of ``world_size`` limits.
    """
    if text is None:
        return None
    try:
        max_shares = [None if part.strip() == "-" else int(part) for part in text.split(",")]
    except ValueError:
        raise ShareError(
            f"max_shares {text!r}: write the most samples of each rank, and - for no limit, such as 64,-"
        ) from None
    return normalize_max_shares(max_shares, world_size)


def normalize_weights(weights: Sequence[float], world_size: int) -> list[float]:
    """Divides the weights by their sum. Raises ShareError unless there is one per rank, finite, >= 0, not all 0."""
    if len(weights) != world_size:
        raise ShareError(
            f"{len(weights)} weights {list(weights)} for {world_size} ranks: give one for each rank"
        )
    for rank, weight in enumerate(weights):
        if not math.isfinite(weight) or weight < 0:
            raise ShareError(f"the weight of rank {rank} is {weight}; it must be a finite number, 0 or more")
    total = sum(weights)
    if not 0 < total < math.inf:
        raise ShareError(
            f"the weights {list(weights)} add up to {total}; some rank must have work, in finite numbers"
        )
    return [weight / total for weight in weights]


def normalize_max_shares(max_shares: Sequence[int | None] | None, world_size: int) -> list[int | None]:
    """Returns one limit per rank, None for none. Raises ShareError for a wrong number of limits or a negative one."""
    if max_shares is None:
        return [None] * world_size
    if len(max_shares) != world_size:
        raise ShareError(
            f"{len(max_shares)} max_shares {list(max_shares)} for {world_size} ranks: give one for each rank"
        )
    for rank, cap in enumerate(max_shares):
        if cap is not None and cap < 0:
            raise ShareError(f"max_shares of rank {rank} is {cap}; it must be 0 or more samples")
    return list(max_shares)


def _limits(world_size: int, batch_size: int, max_shares: Sequence[int | None] | None) -> list[int]:
    if world_size == 0:
        raise ShareError("there is no rank to divide the batch over: give the time of at least one")
    known = normalize_max_shares(max_shares, world_size)
    return [batch_size if cap is None else min(cap, batch_size) for cap in known]


def too_small(limits: Sequence[int], batch_size: int, share_multiple_of: int) -> ShareError:
    """Creates the error for a batch that exceeds the ranks' limits."""
    units = f" in multiples of {share_multiple_of}" if share_multiple_of > 1 else ""
    return ShareError(
        f"the batch has {batch_size} samples, but max_shares of the ranks, {list(limits)}, add up to "
        f"{sum(limits)}{units}: make the batch smaller, raise max_shares or add ranks"
    )


def _give(times: Times, taken: list[int], steps: int, room: Sequence[int], share_multiple_of: int) -> None:
    heap = [
        (time((units + 1) * share_multiple_of), rank)
        for rank, (time, units) in enumerate(zip(times, taken, strict=True))
        if units < room[rank]
    ]
    heapq.heapify(heap)
    for _ in range(steps):
        _, rank = heap[0]
        taken[rank] += 1
        if taken[rank] < room[rank]:
            heapq.heapreplace(heap, (times[rank]((taken[rank] + 1) * share_multiple_of), rank))
        else:
            heapq.heappop(heap)


def _head_start(times: Times, steps: int, room: Sequence[int], share_multiple_of: int) -> list[int]:
    """Returns the quanta per rank that the greedy hands out up to a time just below the optimum, by bisection."""
    working = [(time, limit) for time, limit in zip(times, room, strict=True) if limit]
    low = min(time(share_multiple_of) for time, _ in working)
    high = max(time(limit * share_multiple_of) for time, limit in working)
    best = [0] * len(times)
    while math.isfinite(high - low) and steps - sum(best) > 2 * len(times):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        found = [
            _units_within(middle, time, limit, share_multiple_of)
            for time, limit in zip(times, room, strict=True)
        ]
        if sum(found) <= steps:
            low, best = middle, found
        else:
            high = middle
    return best


def _units_within(seconds: float, time: Callable[[int], float], limit: int, share_multiple_of: int) -> int:
    """Returns how many quanta, at most ``limit``, a rank finishes within ``seconds``."""
    return bisect_right(range(1, limit + 1), seconds, key=lambda units: time(units * share_multiple_of))


def _give_remainder(
    times: Times, shares: list[int], remainder: int, limits: Sequence[int], share_multiple_of: int
) -> None:
    fitting = [rank for rank, share in enumerate(shares) if share + remainder <= limits[rank]]
    if not fitting:
        raise too_small(limits, sum(shares) + remainder, share_multiple_of)
    shares[min(fitting, key=lambda rank: times[rank](shares[rank] + remainder))] += remainder
