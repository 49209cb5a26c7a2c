"""Registry of the all-reduce algorithms by name. To add one, write a file and an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from evener.collectives.schedules.direct import MOST_RANKS, direct
from evener.collectives.schedules.halving import halving
from evener.collectives.schedules.hierarchical import ring_tree
from evener.collectives.schedules.ring import ring
from evener.collectives.schedules.schedule import Algorithm, Topology
from evener.collectives.schedules.tree import double_tree

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "ring": ring,
        "tree": double_tree,
        "halving": halving,
        "direct": direct,
        "ring-tree": ring_tree,
    }
)


def usable_on(topology: Topology) -> tuple[str, ...]:
    """Returns the names of the algorithms that can run on this number of ranks."""
    return tuple(name for name in ALGORITHMS if name != "direct" or topology.world_size <= MOST_RANKS)
