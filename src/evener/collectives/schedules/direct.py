"""Direct all-reduce: everyone sends all of it to everyone, once.

One latency, but every rank receives and adds ``world_size - 1`` whole buffers: for messages so small that
only the latency counts. All ranks must end with the same bits, so each adds the contributions in the order of
the ranks; its own comes to its place as a transfer to itself. On three ranks (``0>1+``: chunk 0 goes to rank
1 and is added there)::

    round   rank 0        rank 1           rank 2
        0   0>0 0>1 0>2   0>0+ 0>1+ 0>2+   0>0+ 0>1+ 0>2+
"""

from __future__ import annotations

import numpy as np

from evener.collectives.schedules.schedule import Round, Schedule, Stretch, Topology

MOST_RANKS = 1024
"""More would not fit in memory as one round; far below, direct all-reduce has ceased to be fast."""


def direct(topology: Topology, segments: int = 1) -> Schedule:
    """One round of ``world_size ** 2`` transfers.

    Raises:
        ValueError: If there are more than ``MOST_RANKS`` ranks.
    """
    if topology.world_size > MOST_RANKS:
        raise ValueError(
            f"a direct all-reduce sends everything to everyone, of no use beyond {MOST_RANKS} ranks; "
            f"there are {topology.world_size}: use another algorithm"
        )
    bounds = np.arange(2.0)
    if topology.world_size == 1:
        return Schedule.of(topology, bounds, ())
    ranks = np.arange(topology.world_size)
    src, dst = ranks[:, None], ranks[None, :]
    return Schedule.of(topology, bounds, [Stretch.once(Round.of(src, dst, 0, 1, reduce=src > 0))])
