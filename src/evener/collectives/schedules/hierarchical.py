"""Ring-tree: rings inside the hosts, double binary trees between them.

Messages between hosts have a high latency, so few rounds should cross hosts. First each host adds up its ranks'
buffers in a ring, which leaves every rank with one slice. Then ranks that hold the same slice on different hosts
all-reduce it over a double tree. Last, a ring inside each host distributes the slices. The number of bytes between
hosts does not grow with the number of ranks per host.

Hosts of unequal size cut the buffer into unequal slices. So the buffer is cut at the ends of all hosts' slices:
with hosts of two ranks and one, at one half; with three and two, at 1/3, 1/2 and 2/3. Each of these pieces has one
holder on each host. On hosts of two ranks and one (``0-1>1+``: chunks 0 and 1 go to rank 1 and are added there)::

    round   rank 0   rank 1   rank 2
        0   0-1>1+   2-3>0+
        1   2>2+     0>2+     1>1+ 3>0+
        2   3>2      1>2      0>1 2>0
        3   2-3>1    0-1>0
"""

from __future__ import annotations

import numpy as np

from evener.collectives.schedules.ring import Rings
from evener.collectives.schedules.schedule import Floats, Ints, Schedule, Topology
from evener.collectives.schedules.tree import trees


def ring_tree(topology: Topology, segments: int = 1) -> Schedule:
    """Returns the schedule: reduce-scatter inside hosts, all-reduce between them in ``segments``, all-gather inside."""
    cuts = _slice_ends(topology)
    parts = 2 * segments if len(topology.hosts) > 1 else 1
    rings = Rings(topology.hosts, cuts, parts)
    between = trees(_holders(topology, cuts), segments)
    return Schedule.from_stretches(
        topology, _subdivide(cuts, parts), (*rings.reduce_scatter(), *between, *rings.all_gather())
    )


def _slice_ends(topology: Topology) -> Floats:
    """Returns the fractions at which slices of any host end. Equal fractions are equal floats (IEEE 754 division)."""
    return np.unique(np.concatenate([np.arange(n + 1) / n for n in {len(host) for host in topology.hosts}]))


def _subdivide(cuts: Floats, parts: int) -> Floats:
    """Cuts each piece between two cuts into ``parts`` equal chunks; returns all bounds."""
    fine = cuts[:-1, None] + np.diff(cuts)[:, None] * (np.arange(parts) / parts)
    return np.append(fine.ravel(), 1.0)


def _holders(topology: Topology, cuts: Floats) -> Ints:
    """Returns the rank that holds each piece on each host after the reduce-scatter, shape [hosts, pieces]."""
    rows = []
    for host in topology.hosts:
        place = np.searchsorted(np.arange(1, len(host) + 1) / len(host), cuts[:-1], side="right")
        rows.append(np.asarray(host, dtype=np.int64)[place - 1])
    return np.stack(rows)
