"""Chooses an owner for each weight that is updated as a whole. Works on numbers alone.

The most costly weight comes first, and each goes to the rank that would be done with all of its own the soonest
(longest processing time first; Graham, SIAM J. Appl. Math. 17, 1969). A rank of twice the speed gets twice the cost::

    speeds 2 : 1      costs 6 5 4 3 2 1      rank 0: 6 4 3 1, done at 7      rank 1: 5 2, done at 7
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_OF_NUMBER = 16
"""The cost of reading and writing a number, in multiplications: a vector costs time too."""


def update_cost(shape: Sequence[int]) -> float:
    """Returns the cost of an update, in multiplications: ``m n min(m, n)`` for a matrix, as of its product with its own
    transpose, and a little for each number. A tensor of more dimensions counts as a matrix of ``shape[0]`` rows."""
    numbers = math.prod(shape)
    rows = shape[0] if len(shape) > 1 else 1
    return float(numbers * (min(rows, numbers // max(1, rows)) + _OF_NUMBER))


def choose_owners(
    costs: Sequence[float], sizes: Sequence[float], speeds: Sequence[float], rooms: Sequence[float]
) -> list[int]:
    """Returns the owner of each weight, the same for the same numbers.

    Args:
        costs: Of the update of each weight.
        sizes: Bytes that its owner needs for each weight.
        speeds: Of each rank, in costs per second. A rank of speed 0 owns something only if no other has memory for it.
        rooms: Bytes that each rank has. What fits nowhere goes where most is left.
    """
    loads, left = [0.0] * len(speeds), list(rooms)
    owners = [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        fitting = [rank for rank, room in enumerate(left) if sizes[place] <= room]
        done = {
            rank: ((loads[rank] + costs[place]) / speeds[rank] if speeds[rank] else math.inf, rank)
            for rank in fitting
        }
        owner = min(done, key=done.__getitem__) if done else left.index(max(left))
        owners[place] = owner
        loads[owner] += costs[place]
        left[owner] -= sizes[place]
    return owners
