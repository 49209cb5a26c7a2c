from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from evener.collectives.schedules.algorithms import ALGORITHMS
from evener.collectives.schedules.schedule import Floats, Topology
from evener.collectives.tuning.cost import Link
from evener.collectives.tuning.simulate import Network, seconds_of_rounds, simulate
from evener.tools.plan.at_scale import (
    ScaleModel,
    StaggeredAllReduce,
    latest_behind,
    steps_at_scale,
)
from evener.tools.plan.checkpoint_interval import daly_interval, expected_goodput

DAY = 86_400.0
NETWORK = Network(Link(3e-6, 1 / 200e9), Link(20e-6, 1 / 25e9))
CALM = ScaleModel(
    compute_seconds=1.0,
    spread=0.0,
    slow_probability=0.0,
    slow_factor=1.0,
    gradient_nbytes=1e9,
    ranks_of_host=8,
    inside=(3e-6, 200e9),
    between=(20e-6, 25e9),
    overlap=0.0,
    device_mttf_seconds=16_384 * 54 * DAY / 466,
    checkpoint_stall_seconds=5.0,
    recovery_seconds=300.0,
)
NOISY = replace(CALM, spread=0.09)
FREE: dict[str, Any] = {"gradient_nbytes": 0.0, "inside": (0.0, 1e9), "between": (0.0, 1e9)}
"""Communication that costs nothing: ranks only wait for each other."""
TOPOLOGIES = [
    pytest.param(Topology.flat(2), id="2"),
    pytest.param(Topology.flat(13), id="13"),
    pytest.param(Topology.of_hosts([4, 4, 2]), id="4+4+2"),
    pytest.param(Topology.of_hosts([8] * 8), id="8x8"),
    pytest.param(Topology((tuple(range(0, 12, 2)), tuple(range(1, 12, 2)))), id="dealt-out"),
]


def arrivals(ranks: int, scale: float, seed: int = 0) -> Floats:
    """Some near to each other, one far behind."""
    generator = np.random.default_rng(seed)
    ready: Floats = scale * generator.exponential(1.0, ranks)
    ready[generator.integers(ranks)] += 5 * scale
    return ready


def taken_one_by_one(
    algorithm: str, topology: Topology, nbytes: float, segments: int, ready: Floats
) -> Floats:
    """Every transfer of every round of the schedule."""
    schedule = ALGORITHMS[algorithm](topology, segments)
    done = ready.tolist()
    for stretch, seconds in zip(
        schedule.stretches, seconds_of_rounds(schedule, nbytes, NETWORK), strict=True
    ):
        for at in range(stretch.times):
            before = list(done)
            for src, dst, *_ in stretch.round_at(at):
                done[dst] = max(done[dst], max(before[src], before[dst]) + seconds)
    return np.array(done)


# All-reduces that ranks enter at different times


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0])
def test_shortcuts_give_what_all_rounds_give(algorithm: str, topology: Topology, scale: float) -> None:
    ready = arrivals(topology.world_size, scale)
    staggered = StaggeredAllReduce(algorithm, topology, 1e6, NETWORK, segments=1)
    naive = taken_one_by_one(algorithm, topology, 1e6, 1, ready)
    assert staggered.finish_seconds(ready) == pytest.approx(naive, rel=1e-12)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("algorithm", ["tree", "ring-tree"])
@pytest.mark.parametrize("segments", [2, 8, 64])
def test_segments_follow_the_first_one(algorithm: str, topology: Topology, segments: int) -> None:
    if algorithm == "ring-tree" and len(topology.hosts) == 1:
        segments = 1
    for scale in (1e-6, 1e-4, 1e-2):
        ready = arrivals(topology.world_size, scale)
        staggered = StaggeredAllReduce(algorithm, topology, 1e7, NETWORK, segments)
        naive = taken_one_by_one(algorithm, topology, 1e7, segments, ready)
        finished = staggered.finish_seconds(ready)
        assert finished.max() == pytest.approx(naive.max(), rel=0.03)
        assert finished == pytest.approx(naive, rel=0.15)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("nbytes", [1e3, 1e8])
def test_ranks_that_enter_at_once_are_done_when_simulate_says(
    algorithm: str, topology: Topology, nbytes: float
) -> None:
    staggered = StaggeredAllReduce(algorithm, topology, nbytes, NETWORK)
    simulated = simulate(ALGORITHMS[algorithm](topology, staggered.segments), nbytes, NETWORK)
    finished = staggered.finish_seconds(np.zeros(topology.world_size))
    assert finished.max() == pytest.approx(simulated)


@pytest.mark.parametrize("algorithm", ["tree", "ring-tree"])
@pytest.mark.parametrize("nbytes", [1e3, 1e6, 1e9])
@pytest.mark.parametrize("hosts", [[32], [8] * 16, [1] * 64])
def test_the_number_of_segments_is_near_the_best(algorithm: str, nbytes: float, hosts: list[int]) -> None:
    topology = Topology.of_hosts(hosts)
    chosen = StaggeredAllReduce(algorithm, topology, nbytes, NETWORK).segments
    powers = (1 << exponent for exponent in range(9))
    best = min(simulate(ALGORITHMS[algorithm](topology, each), nbytes, NETWORK) for each in powers)
    assert simulate(ALGORITHMS[algorithm](topology, chosen), nbytes, NETWORK) < 1.15 * best


def test_links_without_latency_or_without_cost_have_segments_too() -> None:
    for alpha, beta, segments in ((0.0, 1e-9, 256), (1e-6, 0.0, 1), (0.0, 0.0, 1)):
        network = Network(Link(alpha, beta), Link(alpha, beta))
        assert StaggeredAllReduce("tree", Topology.flat(8), 1e6, network).segments == segments


def test_in_a_ring_all_wait_for_a_late_rank_and_take_all_rounds_after_it() -> None:
    topology, ready = Topology.flat(64), np.zeros(64)
    ready[10] = 1.0
    ring = StaggeredAllReduce("ring", topology, 1e6, NETWORK)
    alone = simulate(ALGORITHMS["ring"](topology), 1e6, NETWORK)
    assert ring.finish_seconds(ready) == pytest.approx(1.0 + alone)


def test_in_a_tree_a_late_rank_that_is_near_the_root_delays_less() -> None:
    """After rank 12, a leaf two levels below the root, messages go up one level fewer than after rank 2."""
    tree = StaggeredAllReduce("tree", Topology.flat(13), 0.0, NETWORK)
    alone = tree.finish_seconds(np.zeros(13)).max()
    for rank, rounds in ((12, 5), (2, 6)):
        ready = np.zeros(13)
        ready[rank] = alone
        assert tree.finish_seconds(ready).max() == pytest.approx(alone * (1 + rounds / 6))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 12, 13, 30, 1000])
def test_the_running_maximum(count: int) -> None:
    """Over a ring of 13 and one of 5 in one, and a rank that is in none."""
    behind = np.concatenate([np.roll(np.arange(13), 1), 13 + np.roll(np.arange(5), 2), [18]])
    ready = np.random.default_rng(count).random(19)
    expected = ready
    for _ in range(count):
        expected = np.maximum(expected, expected[behind])
    assert latest_behind(ready, behind, count).tolist() == expected.tolist()


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no all-reduce is named 'rign'; there are ring, tree"):
        steps_at_scale(CALM, 8, "rign")


# Whole steps


@pytest.mark.parametrize("algorithm", ["ring", "tree", "ring-tree"])
@pytest.mark.parametrize("ranks", [8, 20, 64])
def test_without_spread_a_step_is_computation_and_simulated_communication(algorithm: str, ranks: int) -> None:
    cost = steps_at_scale(CALM, ranks, algorithm)
    topology = CALM.topology(ranks)
    segments = StaggeredAllReduce(algorithm, topology, 1e9, NETWORK).segments
    communication = simulate(ALGORITHMS[algorithm](topology, segments), 1e9, NETWORK)
    assert cost.step_seconds == pytest.approx((1 + communication,) * 3, rel=0.02)
    assert cost.communication_share == pytest.approx(communication / (1 + communication), rel=0.02)
    assert cost.waiting_share == pytest.approx(0, abs=0.01)


def test_a_ring_of_very_many_ranks_is_not_taken_round_by_round() -> None:
    ranks, nbytes = 50_000, CALM.gradient_nbytes
    cost = steps_at_scale(CALM, ranks, "ring", steps=2)
    ring = simulate(ALGORITHMS["ring"](CALM.topology(ranks)), nbytes, NETWORK)
    assert cost.step_seconds[1] == pytest.approx(1 + ring)


def test_without_gradients_a_step_lasts_as_long_as_its_slowest_rank() -> None:
    """The median of the greatest of n is the quantile ``0.5 ** (1 / n)`` of one."""
    model, ranks = replace(NOISY, **FREE), 1000
    cost = steps_at_scale(model, ranks, steps=2000)
    deviation = np.sqrt(np.log1p(0.09**2))
    median = np.exp(NormalDist(-(deviation**2) / 2, deviation).inv_cdf(0.5 ** (1 / ranks)))
    assert cost.step_seconds[1] == pytest.approx(median, rel=0.005)
    assert cost.communication_share == 0
    mean = 1 / cost.samples_per_second * ranks
    assert cost.waiting_share == pytest.approx(1 - 1 / mean, rel=0.01)


def test_slow_ranks_delay_all_the_more_the_more_ranks_there_are() -> None:
    model = replace(CALM, slow_probability=0.01, slow_factor=2.0, **FREE)
    few, many = steps_at_scale(model, 1, steps=500), steps_at_scale(model, 1000, steps=500)
    assert few.step_seconds[1] == 1.0
    assert many.step_seconds == (2.0, 2.0, 2.0)
    assert many.waiting_share == pytest.approx(0.99 / 2, rel=0.01)
    assert few.waiting_share == 0


def test_what_overlaps_backward_costs_only_what_backward_does_not_hide() -> None:
    alone = steps_at_scale(CALM, 64).step_seconds[1] - 1
    assert steps_at_scale(replace(CALM, overlap=1.0), 64).step_seconds[1] == pytest.approx(1, abs=1e-3)
    half = steps_at_scale(replace(CALM, overlap=0.5), 64).step_seconds[1]
    assert half - 1 == pytest.approx(alone / 2, rel=0.05)
    long = replace(CALM, gradient_nbytes=100e9)
    exposed = steps_at_scale(replace(long, overlap=1.0), 64).step_seconds[1]
    assert exposed == pytest.approx(steps_at_scale(long, 64).step_seconds[1] - 2 / 3, rel=0.01)


def test_a_rank_begins_its_next_step_when_it_has_the_sum() -> None:
    """On one clock for all steps. Ranks near the root of a tree have the sum earlier than others."""
    model = replace(NOISY, inside=(0.05, 200e9), gradient_nbytes=0.0, ranks_of_host=13)
    tree = StaggeredAllReduce("tree", model.topology(13), 0.0, model.network)
    clock, generator = np.zeros(13), np.random.default_rng(0)
    for _ in range(20):
        clock = tree.finish_seconds(clock + model.computing_seconds(13, generator))
    assert clock.min() < clock.max()
    assert 20 * 13 / steps_at_scale(model, 13, "tree").samples_per_second == pytest.approx(clock.max())


def test_more_noise_and_more_ranks_wait_longer() -> None:
    shares = [steps_at_scale(NOISY, ranks).waiting_share for ranks in (8, 64, 512, 4096)]
    assert shares == sorted(shares)
    assert shares[0] > steps_at_scale(CALM, 4096).waiting_share


def test_ranks_of_a_replica_wait_for_each_other_and_sum_a_part_each() -> None:
    pairs = replace(NOISY, ranks_of_replica=2, samples_of_replica=4.0)
    assert pairs.topology(6).hosts == ((0, 1, 2, 3), (4, 5))
    paired, single = (steps_at_scale(replace(model, **FREE), 64) for model in (pairs, NOISY))
    assert paired.step_seconds == single.step_seconds
    assert paired.waiting_share < single.waiting_share
    assert paired.samples_per_second == pytest.approx(2 * single.samples_per_second)


@pytest.mark.parametrize("ranks_of_replica", [2, 8, 16])
def test_the_sums_of_a_replica_s_ranks_share_the_uplinks(ranks_of_replica: int) -> None:
    """All bytes of a host's ranks have to leave it, whoever computes with whom: g rings of n / g bytes each."""
    free = replace(CALM, inside=(0.0, 1e15), between=(0.0, 25e9), ranks_of_replica=ranks_of_replica)
    cost = steps_at_scale(free, 8 * 64, "ring")
    replicas = 8 * 64 // ranks_of_replica
    leaving = CALM.gradient_nbytes / max(1, ranks_of_replica / 8) * 2 * (replicas - 1) / replicas
    assert cost.step_seconds[1] - 1 == pytest.approx(leaving / 25e9, rel=0.01)


def test_equal_seeds_give_equal_steps() -> None:
    assert steps_at_scale(NOISY, 16, seed=1) == steps_at_scale(NOISY, 16, seed=1)
    assert steps_at_scale(NOISY, 16, seed=1) != steps_at_scale(NOISY, 16, seed=2)


# Failures, and where it ends


def test_failures_come_as_often_as_in_the_run_that_was_published() -> None:
    cost = steps_at_scale(CALM, 16_384, steps=1)
    assert cost.failures_per_day == pytest.approx(466 / 54)
    mtbf = DAY * 54 / 466
    assert cost.checkpoint_interval_seconds == daly_interval(5.0, mtbf)
    assert cost.goodput == expected_goodput(cost.checkpoint_interval_seconds, 5.0, 300.0, mtbf)


def test_a_checkpoint_follows_a_whole_step() -> None:
    cost = steps_at_scale(replace(CALM, checkpoint_stall_seconds=0.0), 64)
    assert cost.checkpoint_interval_seconds == pytest.approx(cost.step_seconds[1])


def test_the_latencies_of_a_ring_end_its_growth_before_those_of_a_tree() -> None:
    short = replace(CALM, compute_seconds=0.1, gradient_nbytes=1e7)
    ring, tree = (
        [steps_at_scale(short, ranks, name, steps=2).samples_per_second for ranks in (1 << 10, 1 << 14)]
        for name in ("ring", "ring-tree")
    )
    assert ring[1] / ring[0] < 8 < tree[1] / tree[0] < 16


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"compute_seconds": 0.0}, "compute_seconds is a positive number, got 0"),
        ({"device_mttf_seconds": float("inf")}, "device_mttf_seconds is a positive number, got inf"),
        ({"spread": -0.1}, "spread is a number of at least 0, got -0.1"),
        ({"overlap": 1.1}, "overlap is a part, from 0 to 1, got 1.1"),
        ({"slow_factor": 0.5}, "slow_factor is at least 1, got 0.5"),
        ({"between": (1e-6, 0.0)}, r"between is a latency .* got \(1e-06, 0.0\)"),
        ({"ranks_of_replica": 3}, "ranks_of_replica is a divisor or a multiple of ranks_of_host, 8, got 3"),
    ],
)
def test_models_out_of_range_are_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(CALM, **changed)


@pytest.mark.parametrize(("ranks", "steps"), [(0, 20), (15, 20), (16, 0)])
def test_parts_of_replicas_and_no_steps_are_refused(ranks: int, steps: int) -> None:
    with pytest.raises(ValueError, match=f"whole replicas of 2.* got {ranks} ranks and {steps} steps"):
        steps_at_scale(replace(CALM, ranks_of_replica=2), ranks, steps=steps)
