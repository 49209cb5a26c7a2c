"""Recursive halving and doubling: as few bytes as a ring, in a logarithmic number of rounds.

Ranks exchange halves of the buffer, then halves of those halves, each time with a partner twice as far away, until
every rank holds one slice of the sum. Then the same exchanges in reverse distribute the slices. Near partners
exchange the large halves. This needs a power of two ranks. If there are k ranks too many, k pairs of ranks fold
into one rank each at the beginning, and unfold at the end. That costs two more rounds with the whole buffer. On
five ranks (``0-1>1+``: chunks 0 and 1 go to rank 1 and are added there)::

    round   rank 0   rank 1   rank 2   rank 3   rank 4
        0   0-3>1+
        1            2-3>2+   0-1>1+   2-3>4+   0-1>3+
        2            1>3+     3>4+     0>1+     2>2+
        3            0>3      2>4      1>1      3>2
        4            0-1>2    2-3>1    0-1>4    2-3>3
        5            0-3>0

Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from evener.collectives.schedules.schedule import Ints, Round, Schedule, Stretch, Topology


def halving(topology: Topology, segments: int = 1) -> Schedule:
    """Returns the schedule: fold to a power of two, halve, double, unfold. Ignores ``segments``."""
    size = 1 << (topology.world_size.bit_length() - 1)
    pairs = topology.world_size - size
    spare, partner = topology.order[0 : 2 * pairs : 2], topology.order[1 : 2 * pairs : 2]
    rounds = list(_halve_and_double(np.concatenate([partner, topology.order[2 * pairs :]])))
    if pairs:
        rounds.insert(0, Round.from_columns(spare, partner, 0, size, reduce=True))
        rounds.append(Round.from_columns(partner, spare, 0, size, reduce=False))
    return Schedule.from_stretches(topology, np.arange(size + 1) / size, map(Stretch.once, rounds))


def _halve_and_double(ranks: Ints) -> Iterator[Round]:
    """Yields the rounds of an all-reduce over a power of two of ``ranks``. Halving leaves ``holder[i]`` with chunk
    ``i``."""
    position = np.arange(len(ranks))
    holder = ranks[_bits_reversed(len(ranks))]
    widths = [1 << bit for bit in range(len(ranks).bit_length() - 1)]
    for width in reversed(widths):
        theirs = (position ^ width) & -width
        yield Round.from_columns(holder, holder[position ^ width], theirs, theirs + width, reduce=True)
    for width in widths:
        own = position & -width
        yield Round.from_columns(holder, holder[position ^ width], own, own + width, reduce=False)


def _bits_reversed(size: int) -> Ints:
    """Returns the numbers below ``size``, a power of two, with their bits reversed: near ranks get distant chunks."""
    order = np.zeros(1, dtype=np.int64)
    while len(order) < size:
        order = np.concatenate([2 * order, 2 * order + 1])
    return order
