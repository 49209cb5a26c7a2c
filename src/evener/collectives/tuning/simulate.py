"""Simulates the time of a schedule over links of known cost, for any number of ranks.

The model runs rounds in lock-step: a round lasts as long as its slowest rank, and the next one begins when all ranks
have finished. In reality, a rank that does not depend on the slowest can go on earlier. So the estimate is too high if
ranks have unequal loads; for a ring over equal links it is exact. Within a round all messages start together. A rank
has one port, which sends one message and receives one message at a time. Messages to other hosts also share the uplinks
of both hosts. So a message arrives after its latency, plus the time for the bytes of all messages that share a port or
an uplink with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evener.collectives.schedules.schedule import Floats, Ints, Round, Schedule, Topology
from evener.collectives.tuning.cost import Link


@dataclass(frozen=True)
class Network:
    """The costs of the links of a topology.

    Raises:
        ValueError: If hosts have no uplink, or gamma is negative or not finite.
    """

    inside: Link | tuple[Link, ...]
    """The link between ranks of one host: one for all hosts, or one for each host."""
    between: Link | tuple[Link, ...]
    """The uplink of a host: one for all hosts, or one for each host. Between two hosts the slower one counts."""
    gamma_seconds_per_byte: float = 0.0
    """The time for a rank to add a byte to another, in seconds."""
    uplinks: int = 1
    """Number of network interfaces of a host, each as fast as ``between``. The host's ranks use them in turn."""

    def __post_init__(self) -> None:
        if self.uplinks < 1 or not 0 <= self.gamma_seconds_per_byte < math.inf:
            raise ValueError(
                f"a network needs at least one uplink and a finite gamma of at least 0, got {self}"
            )


def simulate(schedule: Schedule, nbytes: float, network: Network) -> float:
    """Returns the seconds for an all-reduce of a buffer of ``nbytes``. It evaluates one round of each stretch.

    Raises:
        ValueError: If ``network`` has links for another number of hosts.
    """
    each = seconds_of_rounds(schedule, nbytes, network)
    return sum(stretch.times * seconds for stretch, seconds in zip(schedule.stretches, each, strict=True))


def seconds_of_rounds(schedule: Schedule, nbytes: float, network: Network) -> list[float]:
    """Returns the seconds of one round of each stretch, for an all-reduce of a buffer of ``nbytes``.

    Raises:
        ValueError: If ``network`` has links for another number of hosts.
    """
    links = _Links(schedule.topology, network)
    return [links.seconds(schedule.bounds, stretch.round_at(0), nbytes) for stretch in schedule.stretches]


class _Links:
    """The links of a network as arrays, with one entry for each host."""

    def __init__(self, topology: Topology, network: Network) -> None:
        self.topology, self.network = topology, network
        hosts = len(topology.hosts)
        self.inside_alpha, self.inside_beta = _columns(network.inside, hosts)
        self.between_alpha, self.between_beta = _columns(network.between, hosts)
        ranks_per_host = max(map(len, topology.hosts))
        uplinks = min(network.uplinks, ranks_per_host)
        self.uplink = topology.host_index * uplinks + topology.place % uplinks

    def seconds(self, bounds: Floats, round_: Round, nbytes: float) -> float:
        """Returns the duration of a round, until the last message has arrived and been added."""
        size = (bounds[round_.stop] - bounds[round_.start]) * nbytes
        alpha, busy = self._messages(round_, size)
        world_size = self.topology.world_size
        queue = np.maximum(_shared(round_.src, busy, world_size), _shared(round_.dst, busy, world_size))
        self._wait_for_uplinks(round_, busy, queue)
        added = _shared(round_.dst, size * round_.reduce, world_size) * self.network.gamma_seconds_per_byte
        return float((alpha + queue + added).max())

    def _messages(self, round_: Round, size: Floats) -> tuple[Floats, Floats]:
        """Returns the latency of each message, and how long it keeps its ports busy."""
        a, b = self.topology.host_index[round_.src], self.topology.host_index[round_.dst]
        alpha = np.where(
            a == b, self.inside_alpha[a], np.maximum(self.between_alpha[a], self.between_alpha[b])
        )
        beta = np.where(a == b, self.inside_beta[a], np.maximum(self.between_beta[a], self.between_beta[b]))
        moves = round_.src != round_.dst
        return alpha * moves, beta * size * moves

    def _wait_for_uplinks(self, round_: Round, busy: Floats, queue: Floats) -> None:
        """Raises the ``queue`` times of messages between hosts to those of the uplinks at both ends, in place."""
        host = self.topology.host_index
        away = np.flatnonzero(host[round_.src] != host[round_.dst])
        for uplink in (self.uplink[round_.src[away]], self.uplink[round_.dst[away]]):
            queue[away] = np.maximum(queue[away], _shared(uplink, busy[away], int(self.uplink.max()) + 1))


def _shared(user: Ints, busy: Floats, users: int) -> Floats:
    """Returns for each message the total busy time of all messages with the same user (port or uplink)."""
    total = np.bincount(user, weights=busy, minlength=users)
    each: Floats = total.astype(np.float64)[user]
    return each


def _columns(links: Link | Sequence[Link], hosts: int) -> tuple[Floats, Floats]:
    each = [links] * hosts if isinstance(links, Link) else links
    if len(each) != hosts:
        raise ValueError(f"the network has links for {len(each)} hosts, the topology has {hosts} hosts")
    return (
        np.array([link.alpha_seconds for link in each]),
        np.array([link.beta_seconds_per_byte for link in each]),
    )
