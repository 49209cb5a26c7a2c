"""Direct all-reduce: every rank sends its whole buffer to every other rank, once.

It takes one latency, but every rank receives and adds ``world_size - 1`` whole buffers. So it suits messages so
small that only the latency counts. For the same bits on all ranks, each rank adds the contributions in the order of
the ranks; its own is a transfer to itself. On three ranks (``0>1+``: chunk 0 goes to rank 1 and is added there)::

    round   rank 0        rank 1           rank 2
        0   0>0 0>1 0>2   0>0+ 0>1+ 0>2+   0>0+ 0>1+ 0>2+
"""

from __future__ import annotations

import numpy as np

from evener.collectives.schedules.schedule import Round, Schedule, Stretch, Topology

MOST_RANKS = 1024
"""With more ranks, the round would not fit in memory. Direct all-reduce is slow at far fewer ranks already."""


def direct(topology: Topology, segments: int = 1) -> Schedule:
    """Returns a schedule of one round with ``world_size ** 2`` transfers. Ignores ``segments``.

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
        return Schedule.from_stretches(topology, bounds, ())
    ranks = np.arange(topology.world_size)
    src, dst = ranks[:, None], ranks[None, :]
    return Schedule.from_stretches(
        topology, bounds, [Stretch.once(Round.from_columns(src, dst, 0, 1, reduce=src > 0))]
    )
