"""Simulates whole steps of data parallelism on up to 100,000 ranks: stragglers, all-reduce, failures.

Ranks take unequal times to compute. Each enters the all-reduce when its gradients are ready, and waits in the rounds of
the algorithm for the ranks from which it receives. It begins its next step when it has the sum. So the steps of a run
are longer than computation and communication by themselves, and more so on more ranks.

**Cost.** A ring of p ranks has 2 (p - 1) rounds, which are not taken one by one. If a rank receives a message in k
equal rounds from the rank behind, it is done k rounds after the latest among itself and the k ranks behind. This
running maximum takes ``log k`` doublings. A tree has a logarithmic number of rounds, and segments after the first
follow it a round apart. So a step costs ``p log p``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from evener.collectives.schedules.algorithms import ALGORITHMS
from evener.collectives.schedules.schedule import Floats, Ints, Round, Topology
from evener.collectives.tuning.cost import Link
from evener.collectives.tuning.simulate import Network, seconds_of_rounds
from evener.tools.plan.checkpoint_interval import daly_interval, expected_goodput

BACKWARD_SHARE = 2 / 3
"""Part of a step's computation that backward takes: it multiplies twice as many matrices as forward."""
_MOST_SEGMENTS = 256


@dataclass(frozen=True)
class ScaleModel:
    """What a step costs one rank, what joins the ranks, and how often a device fails.

    Raises:
        ValueError: If a number is out of its range.
    """

    compute_seconds: float
    """Mean time of a rank's own work in a step, in seconds, without slow ranks."""
    spread: float
    """Standard deviation of that time over its mean, log-normal over ranks and steps. On 64,000 GPUs and more, 0.09 was
    seen (PRISM, arXiv 2510.15596)."""
    slow_probability: float
    """The probability that a rank is slow in a step."""
    slow_factor: float
    """How many times as long a slow rank computes, at least 1."""
    gradient_nbytes: float
    """Size of the gradients of the whole model, in bytes."""
    ranks_of_host: int
    """Number of ranks of each host; the last host may have fewer."""
    inside: tuple[float, float]
    """Latency in seconds and bandwidth in bytes per second between two ranks of a host."""
    between: tuple[float, float]
    """The same for the uplink of a host, which its ranks share."""
    overlap: float
    """Part of the gradients, 0 to 1, that is summed from the begin of backward on; the rest is summed after it. Also
    if no bytes are left for then, ranks wait for each other, in messages that cost their latencies."""
    device_mttf_seconds: float
    """Mean time to failure of one device and of what belongs to it. A run on 16,384 GPUs had 466 interruptions in 54
    days (Llama 3, arXiv 2407.21783): 5.2 years a GPU. Rates of other clusters are in arXiv 2410.21680."""
    checkpoint_stall_seconds: float
    """Seconds in which training stands still for a checkpoint."""
    recovery_seconds: float
    """Seconds from a failure until the run trains again."""
    ranks_of_replica: int = 1
    """Number of consecutive ranks that compute a replica together. They wait for each other, and each sums its part of
    the gradients with the ranks at its place in other replicas."""
    samples_of_replica: float = 1.0
    """Number of samples that a replica computes in a step."""

    def __post_init__(self) -> None:
        positive = ("compute_seconds", "ranks_of_host", "device_mttf_seconds", "ranks_of_replica")
        for name in (*positive, "samples_of_replica"):
            self._check(name, 0 < getattr(self, name) < math.inf, "a positive number")
        for name in ("spread", "gradient_nbytes", "checkpoint_stall_seconds", "recovery_seconds"):
            self._check(name, 0 <= getattr(self, name) < math.inf, "a number of at least 0")
        for name in ("overlap", "slow_probability"):
            self._check(name, 0 <= getattr(self, name) <= 1, "a part, from 0 to 1")
        self._check("slow_factor", 1 <= self.slow_factor < math.inf, "at least 1")
        for name in ("inside", "between"):
            latency, bandwidth = getattr(self, name)
            right = 0 <= latency < math.inf and 0 < bandwidth < math.inf
            self._check(name, right, "a latency of at least 0 and a positive bandwidth")
        divides = 0 in (
            self.ranks_of_host % self.ranks_of_replica,
            self.ranks_of_replica % self.ranks_of_host,
        )
        self._check(
            "ranks_of_replica", divides, f"a divisor or a multiple of ranks_of_host, {self.ranks_of_host}"
        )

    def _check(self, name: str, right: bool, wanted: str) -> None:
        if not right:
            raise ValueError(f"{name} is {wanted}, got {getattr(self, name)}")

    def topology(self, replicas: int) -> Topology:
        """Returns the hosts of the ranks that sum with each other: one rank of each replica."""
        inside = max(1, self.ranks_of_host // self.ranks_of_replica)
        sizes = [inside] * (replicas // inside) + [replicas % inside] * (replicas % inside > 0)
        return Topology.of_hosts(sizes)

    @property
    def network(self) -> Network:
        """The links that such ranks have. The sums of all places in a replica share a host's uplink at any time."""
        sharing = min(self.ranks_of_host, self.ranks_of_replica)
        return Network(
            Link(self.inside[0], 1 / self.inside[1]), Link(self.between[0], sharing / self.between[1])
        )

    def computing_seconds(self, ranks: int, generator: np.random.Generator) -> Floats:
        """Draws the time of each replica's work in a step: that of its slowest rank. Shape [replicas]."""
        variance = math.log1p(self.spread**2)
        drawn = generator.lognormal(-variance / 2, math.sqrt(variance), ranks) * self.compute_seconds
        drawn[generator.random(ranks) < self.slow_probability] *= self.slow_factor
        slowest: Floats = drawn.reshape(-1, self.ranks_of_replica).max(axis=1)
        return slowest


class _Hop(NamedTuple):
    """Equal rounds that follow each other: what is received from whom, and how long one round lasts."""

    src: Ints
    dst: Ints
    times: int
    seconds: float


class StaggeredAllReduce:
    """An all-reduce that ranks enter at different times.

    A round lasts as long as in :func:`~evener.collectives.tuning.simulate.simulate`. A rank begins a round when it has
    done its round before, and so has the rank from which it receives. If all ranks enter at once, the last one is done
    after the time that ``simulate`` says.

    Args:
        algorithm: A name from ``ALGORITHMS``.
        topology: The ranks and their hosts.
        nbytes: The size of the buffer, in bytes.
        network: The links.
        segments: The number of segments of a pipelined algorithm; by default about the fastest one.

    Raises:
        ValueError: If there is no such algorithm, or it cannot run on so many ranks.
    """

    def __init__(
        self, algorithm: str, topology: Topology, nbytes: float, network: Network, segments: int | None = None
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"no all-reduce is named {algorithm!r}; there are {', '.join(ALGORITHMS)}")
        self.segments = segments or segments_for(algorithm, topology, nbytes, network)
        schedule = ALGORITHMS[algorithm](topology, self.segments)
        self._hops: list[_Hop] = []
        for stretch, seconds in zip(
            schedule.stretches, seconds_of_rounds(schedule, nbytes, network), strict=True
        ):
            first, last = (self._of_first_segment(stretch.round_at(at)) for at in (0, stretch.times - 1))
            alike = len(last[1]) == len(first[1])
            self._hops.append(_Hop(*first, stretch.times if alike else 1, seconds))
            if not alike:
                self._hops.append(_Hop(*last, stretch.times - 1, seconds))

    def _of_first_segment(self, round_: Round) -> tuple[Ints, Ints]:
        """Returns source and destination of the transfers that move a first segment; all of them if there is one."""
        moved = round_.start % self.segments == 0
        return round_.src[moved], round_.dst[moved]

    def finish_seconds(self, ready: Floats) -> Floats:
        """Returns when each rank has the sum, in seconds, shape [world_size]; ``ready`` says when each enters."""
        done = ready.copy()
        for src, dst, times, seconds in self._hops:
            if not len(dst):  # only later segments move, which all ranks await
                done += times * seconds
                continue
            if times == 1:
                np.maximum.at(done, dst, done[src])
            else:
                behind = np.arange(len(done))
                behind[dst] = src
                done = latest_behind(done, behind, times)
            done[dst] += times * seconds
        return done


def latest_behind(ready: Floats, behind: Ints, count: int) -> Floats:
    """Returns the maximum over each rank and the ``count`` ranks behind it, by doubling.

    Args:
        ready: A number for each rank.
        behind: The rank behind each rank.
        count: How many ranks to go back; it may be more than there are.
    """
    latest, reached = ready, np.arange(len(ready))
    for bit in f"{count:b}":
        latest, reached = np.maximum(latest, latest[reached]), reached[reached]
        if bit == "1":
            latest, reached = np.maximum(latest, latest[behind]), behind[reached]
    return latest


def segments_for(algorithm: str, topology: Topology, nbytes: float, network: Network) -> int:
    """Returns a power of two near the fastest number of segments.

    Two trees of depth d take ``2 d + k - 1`` rounds for k segments, and about ``n (2 + (2 d - 3) / k)`` bytes pass a
    port (Sanders, Speck and Träff 2009). The derivative by k is 0 where ``k ** 2`` is ``n (2 d - 3) beta / alpha``.
    """
    size = {"tree": topology.world_size, "ring-tree": len(topology.hosts)}.get(algorithm, 1)
    depth = size.bit_length() - 1
    if depth < 1:
        return 1
    link = network.between if len(topology.hosts) > 1 else network.inside
    if not isinstance(link, Link):
        link = max(link, key=lambda each: each.beta_seconds_per_byte)
    best = nbytes * max(1, 2 * depth - 3) * link.beta_seconds_per_byte
    if best <= link.alpha_seconds:
        return 1
    if best >= _MOST_SEGMENTS**2 * link.alpha_seconds:
        return _MOST_SEGMENTS
    return int(2 ** round(math.log2(best / link.alpha_seconds) / 2))


@dataclass(frozen=True)
class CostAtScale:
    """What steps cost on a number of ranks."""

    ranks: int
    step_seconds: tuple[float, float, float]
    """Seconds of a step: the 10th, 50th and 90th percentile over steps."""
    waiting_share: float
    """Share of the ranks' time in which they wait until the last one has computed."""
    communication_share: float
    """Share of the time that an all-reduce takes after the last rank has computed. The remaining share is
    computation, with what is summed beside it."""
    samples_per_second: float
    """Samples of all replicas in a second of training, without failures."""
    failures_per_day: float
    """Expected number of failures of the run in a day."""
    checkpoint_interval_seconds: float
    """Seconds of training between checkpoints that lose least (Daly), and at least those of a step."""
    goodput: float
    """Expected share of time in which steps count, with that interval."""


def steps_at_scale(
    model: ScaleModel, ranks: int, algorithm: str = "ring-tree", steps: int = 20, seed: int = 0
) -> CostAtScale:
    """Simulates ``steps`` steps on ``ranks`` ranks. Equal arguments give equal results.

    Args:
        model: Costs of a step, links and failures.
        ranks: Number of ranks, a multiple of ``model.ranks_of_replica``.
        algorithm: The all-reduce: ``ring``, ``tree``, ``ring-tree`` or another name from ``ALGORITHMS``.
        steps: Number of steps.
        seed: Seed of the ranks' times.

    Raises:
        ValueError: If a number is below 1, the ranks do not form whole replicas, or the algorithm cannot run on them.
    """
    if min(ranks, steps) < 1 or ranks % model.ranks_of_replica:
        raise ValueError(
            f"whole steps need ranks in whole replicas of {model.ranks_of_replica}, and at least 1 step; "
            f"got {ranks} ranks and {steps} steps"
        )
    replicas = ranks // model.ranks_of_replica
    topology, nbytes = model.topology(replicas), model.gradient_nbytes / model.ranks_of_replica
    beside, after = (
        StaggeredAllReduce(algorithm, topology, part * nbytes, model.network)
        for part in (model.overlap, 1 - model.overlap)
    )
    generator = np.random.default_rng(seed)
    begun, seconds = np.zeros(replicas), np.zeros(steps)
    waiting = communication = 0.0
    for step in range(steps):
        computing = model.computing_seconds(ranks, generator)
        ready = computed = begun + computing
        if model.overlap:
            ready = np.maximum(computed, beside.finish_seconds(computed - BACKWARD_SHARE * computing))
        done = after.finish_seconds(ready)
        seconds[step], last = done.max(), computed.max()
        waiting += float((last - computed).mean())
        communication += float(seconds[step] - last)
        begun = done - seconds[step]
    total, mtbf = float(seconds.sum()), model.device_mttf_seconds / ranks
    interval = max(daly_interval(model.checkpoint_stall_seconds, mtbf), total / steps)
    p10, p50, p90 = np.percentile(seconds, (10, 50, 90)).tolist()
    return CostAtScale(
        ranks=ranks,
        step_seconds=(p10, p50, p90),
        waiting_share=waiting / total,
        communication_share=communication / total,
        samples_per_second=model.samples_of_replica * replicas * steps / total,
        failures_per_day=86_400 / mtbf,
        checkpoint_interval_seconds=interval,
        goodput=expected_goodput(interval, model.checkpoint_stall_seconds, model.recovery_seconds, mtbf),
    )
