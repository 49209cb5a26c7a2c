"""Seconds of messages and of collective operations on a cluster.

::

    rounds x latency + bytes / bandwidth        of a ring, within machines first and then between them

A sum of n bytes over the g ranks of a machine, on each of N machines, takes by the two-level ring algorithm

    2 (g - 1) (l + n / (g b))  +  2 (N - 1) (L + n s / (N B))

with latency l and bandwidth b inside and L, B between. ``s`` groups of a machine share its connection with others
(Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, for the ring;
the levels are those of NCCL's documentation). A scatter of sums or a gather is half of that. NCCL also has double
binary trees between machines (since 2.4), and takes what its own model (``src/graph/tuning.cc``) finds faster:

    2 ((g - 1) l + log2(N) L)  +  2 n / (0.9 min(b, B / s))

Evener's own all-reduces are simulated round by round, over the same links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from evener.collectives.registry import candidates
from evener.collectives.schedules.algorithms import ALGORITHMS
from evener.collectives.schedules.schedule import Topology
from evener.collectives.shared_memory.multi_host import PART_NBYTES
from evener.collectives.tuning.cost import Link
from evener.collectives.tuning.simulate import Network, simulate
from evener.tools.estimate.traffic import Message
from evener.tools.plan.at_scale import segments_for
from evener.tools.plan.cluster import Cluster, PlannedLink

MESSAGE_START_SECONDS = 50e-6
"""About what it takes the host to start a message, with the code around it: a round figure. The host also starts each
round of one of Evener's own all-reduces. On the CPU, the latency of a link has it already."""
TREE_BANDWIDTH = 0.9
"""The part of a ring's bandwidth that NCCL counts on for its trees."""
WHOLE = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "broadcast": 1.0,
    "all_to_all": 1.0,
    "send": 1.0,
}
"""How many times each rank sends all other ranks' parts of a tensor."""


@dataclass(frozen=True)
class _GroupPath:
    """What lies between the ranks of a group."""

    topology: Topology
    """The group's own ranks, by machine."""
    insides: tuple[Link, ...]
    """The link within each machine."""
    of_machine: int
    """The most ranks of a machine."""
    inside: PlannedLink | None
    """The slowest link within a machine; None if each machine has one rank."""
    between: PlannedLink
    """The connection of a machine, of which other groups have their parts."""

    @property
    def machines(self) -> int:
        return len(self.topology.hosts)

    @cached_property
    def network(self) -> Network:
        return Network(self.insides, self.between.cost)

    def two_levels(self, nbytes: float, times: float) -> float:
        """Returns the seconds of rings within machines, and then between them."""
        return self.within(nbytes, times) + self.across(nbytes, times)

    def within(self, nbytes: float, times: float) -> float:
        """Returns the seconds of the rings within machines."""
        if self.inside is None:
            return 0.0
        return times * (self.of_machine - 1) * _seconds(self.inside, nbytes / self.of_machine)

    def across(self, nbytes: float, times: float) -> float:
        """Returns the seconds of the rings between machines."""
        return times * (self.machines - 1) * _seconds(self.between, nbytes / self.machines)

    def nccl_tree(self, nbytes: float) -> float:
        """Returns the seconds of a sum by NCCL's trees."""
        slowest = min(each.bytes_per_second for each in (self.inside or self.between, self.between))
        latency = math.ceil(math.log2(self.machines)) * self.between.latency_seconds
        if self.inside is not None:
            latency += (self.of_machine - 1) * self.inside.latency_seconds
        return 2 * latency + 2 * nbytes / (TREE_BANDWIDTH * slowest)

    def leaders(self, nbytes: float) -> float:
        """Returns the seconds of "two-level": one part is summed inside, or copied there, while another is between."""
        parts = max(1, math.ceil(nbytes / PART_NBYTES))
        each = nbytes / parts
        copy = 0.0 if self.inside is None else _seconds(self.inside, each)
        inside = self.within(each, 2.0) + copy
        between = 2 * (self.machines - 1) * _seconds(self.between, each / self.machines)
        return inside + between + (parts - 1) * max(inside, between)


class MessageTimes:
    """Predicts messages on a cluster. Looks at each group of ranks once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._on_cards = cluster.ranks[0][1].kind != "cpu"
        self._routes: dict[tuple[int, ...], _GroupPath] = {}
        self._simulated: dict[tuple[tuple[int, ...], str, int], float] = {}

    def seconds(self, message: Message, all_reduce: str | None = None) -> float:
        """Returns the seconds of a message, or of a collective operation.

        Args:
            all_reduce: Name of the all-reduce that sums. None for the default.
        """
        if message.kind == "send":
            return _seconds(self._cluster.link(*message.ranks), message.nbytes)
        route = self._route(message.ranks)
        if message.kind != "all_reduce":
            return route.two_levels(message.nbytes, WHOLE[message.kind])
        if all_reduce == "auto":
            names = [None, *self.other_all_reduces(message.ranks)]
            return min(self.seconds(message, name) for name in names)
        if all_reduce is not None and all_reduce in ALGORITHMS:
            return self._by_simulation(message, all_reduce)
        if all_reduce == "two-level":
            return route.leaders(message.nbytes)
        if route.machines == 1:
            return route.two_levels(message.nbytes, 2.0)
        if self._on_cards:
            return min(route.two_levels(message.nbytes, 2.0), route.nccl_tree(message.nbytes))
        return self._by_simulation(message, "ring")  # gloo's

    def other_all_reduces(self, ranks: tuple[int, ...]) -> list[str]:
        """Returns the names of the all-reduces that a group of ranks may take in place of its default."""
        topology = self._route(ranks).topology
        if self._on_cards:
            return candidates(topology)[1:]
        # On one machine the default is shared memory, which sends nothing over links.
        return [*candidates(topology)[1:], "two-level"] if len(topology.hosts) > 1 else []

    def _by_simulation(self, message: Message, name: str) -> float:
        key = (message.ranks, name, message.nbytes)
        if key not in self._simulated:
            route = self._route(message.ranks)
            segments = segments_for(name, route.topology, message.nbytes, route.network)
            schedule = ALGORITHMS[name](route.topology, segments)
            rounds = sum(stretch.times for stretch in schedule.stretches) if self._on_cards else 0
            seconds = simulate(schedule, message.nbytes, route.network)
            self._simulated[key] = seconds + rounds * MESSAGE_START_SECONDS
        return self._simulated[key]

    def _route(self, ranks: tuple[int, ...]) -> _GroupPath:
        if ranks not in self._routes:
            self._routes[ranks] = self._looked_at(ranks)
        return self._routes[ranks]

    def _looked_at(self, ranks: tuple[int, ...]) -> _GroupPath:
        hosts: dict[int, list[int]] = {}
        for index, rank in enumerate(ranks):
            hosts.setdefault(self._cluster.ranks[rank][0], []).append(index)
        most, machines = max(map(len, hosts.values())), self._cluster.machines
        links = [machines[place].inside for place, own in hosts.items() if len(own) > 1]
        between = self._cluster.between
        sharing = max(1, len(machines[next(iter(hosts))].cards) // most)
        return _GroupPath(
            Topology(tuple(map(tuple, hosts.values()))),
            tuple(machines[place].inside.cost for place in hosts),
            most,
            min(links, key=lambda link: link.bytes_per_second, default=None),
            PlannedLink(between.latency_seconds, between.bytes_per_second / sharing),
        )


def _seconds(link: PlannedLink, nbytes: float) -> float:
    return link.latency_seconds + nbytes / link.bytes_per_second
