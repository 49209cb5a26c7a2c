"""Seconds of messages and passes on cards and links, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evener.distributed.mesh import Layout
from evener.errors import ConfigurationError
from evener.tools.estimate.traffic import Message
from evener.tools.plan.analytic import (
    EFFICIENCY,
    HIDDEN,
    HIDDEN_GATHERS,
    MEASURED_EFFICIENCY,
    START_SECONDS,
    MessageTimes,
    costs_of_work,
    speed_of,
    update_seconds,
)
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.cluster import Cluster, Machine, PlannedLink
from evener.tools.plan.costs import StepTime, step_time
from evener.tools.plan.work import RankWork, StepWork
from tests.tools.plan.models import FAST, SLOW, plan_card, plan_cluster

MB = 1_000_000
RANK = RankWork(8, int(6e12), 1000, 0, (), 1000 * MB, 2000 * MB, 4000 * MB)


def seconds(kind: str, ranks: range | tuple[int, ...], nbytes: int, cluster: Cluster) -> float:
    return MessageTimes(cluster).seconds(Message(kind, tuple(ranks), nbytes))


def step(*ranks: RankWork, cluster: Cluster, layout: Layout | None = None, batch: int = 16) -> StepTime:
    layout = layout or Layout({"data": 2})
    found = StepWork(Candidate(layout.world_size, "ddp"), layout, ranks)
    return step_time(costs_of_work(found, cluster, "float32", 1.0), batch)


# Messages


def test_a_ring_within_a_machine() -> None:
    """Each of 2 (g - 1) rounds sends one of g pieces."""
    cluster, nbytes = plan_cluster(1, 4), 400 * MB
    one = 1e-6 + 100 * MB / 100e9
    assert seconds("all_reduce", range(4), nbytes, cluster) == pytest.approx(6 * one)
    for half in ("reduce_scatter", "all_gather", "broadcast", "all_to_all"):
        assert seconds(half, range(4), nbytes, cluster) == pytest.approx(3 * one)
    assert seconds("send", (0, 1), nbytes, cluster) == pytest.approx(1e-6 + nbytes / 100e9)


def test_a_ring_over_two_levels() -> None:
    """Between machines each rank sums its piece, and all pieces of a machine pass its connection."""
    nbytes = 400 * MB
    inside = 6 * (1e-6 + nbytes / 4 / 100e9)
    between = 4 * (50e-6 + nbytes / 3 / 1e9)
    assert seconds("all_reduce", range(12), nbytes, plan_cluster(3, 4)) == pytest.approx(inside + between)
    assert seconds("send", (3, 4), nbytes, plan_cluster(3, 4)) == pytest.approx(50e-6 + nbytes / 1e9)


def test_groups_share_the_connection_of_a_machine() -> None:
    """Tensor parallelism within machines: each of four places sums its quarter with its own place elsewhere."""
    cluster, nbytes = plan_cluster(2, 4), 400 * MB
    alone = seconds("all_reduce", (0, 1), nbytes, plan_cluster(2, 1))
    shared = seconds("all_reduce", (0, 4), nbytes, cluster)
    assert alone == pytest.approx(2 * (50e-6 + nbytes / 2 / 1e9))
    assert shared == pytest.approx(2 * (50e-6 + 4 * nbytes / 2 / 1e9))
    two_of_each = seconds("all_reduce", (0, 1, 4, 5), nbytes, cluster)
    assert two_of_each == pytest.approx(2 * (1e-6 + nbytes / 2 / 100e9) + 2 * (50e-6 + 2 * nbytes / 2 / 1e9))


def test_small_messages_cost_their_latencies() -> None:
    cluster = plan_cluster(64, 1)
    assert seconds("all_reduce", range(64), 64, cluster) == pytest.approx(126 * 50e-6, rel=1e-3)


def test_the_slowest_machine_of_a_group_counts() -> None:
    fast, slow = (Machine("", (plan_card(),) * 2, link, 0) for link in (FAST, SLOW))
    mixed = Cluster((fast, slow), PlannedLink(0.0, 1e15))
    expected = 2 * (50e-6 + 10 * MB / 2 / 1e9)
    assert seconds("all_reduce", range(4), 10 * MB, mixed) == pytest.approx(expected, rel=1e-3)


# Passes and the update


def test_passes_take_operations_over_the_speed_and_bytes_over_the_bandwidth() -> None:
    rank = replace(RANK, moved=int(3e9), operators=0)
    found = step(rank, cluster=plan_cluster(1, 2))
    assert found.compute == pytest.approx(6e12 / 100e12 + 3e9 / 1e12)
    assert found.update == pytest.approx((3 * 1000 + 2 * 2000) * MB / 1e12)
    assert found.seconds == pytest.approx(found.compute + found.update)
    assert step(rank, cluster=plan_cluster(1, 2), batch=32).compute == pytest.approx(2 * found.compute)


def test_a_card_is_never_faster_than_its_host_starts_operators() -> None:
    small = replace(RANK, flops=1000, operators=5000)
    assert step(small, cluster=plan_cluster(1, 2)).compute == pytest.approx(5000 * START_SECONDS)
    cpu = Machine("", (replace(plan_card(), kind="cpu"),) * 2, FAST, 0)
    assert step(small, cluster=Cluster((cpu,), FAST)).compute < 1e-9, "there the operators are the work"


def test_a_type_that_a_card_does_not_compute_is_refused_in_words() -> None:
    with pytest.raises(ConfigurationError, match="of the speed of card in float16; known are float32"):
        speed_of(plan_card(), "float16")


def test_measured_speeds_are_nearer_to_what_is_reached() -> None:
    card = plan_card()
    assert speed_of(card, "float32") == EFFICIENCY * 100e12
    assert speed_of(replace(card, is_measured=True), "float32") == MEASURED_EFFICIENCY * 100e12
    assert speed_of(card, "float32", 0.5) == 50e12


def test_the_update_reads_and_writes_weights_and_state() -> None:
    assert update_seconds(RANK, plan_card()) == pytest.approx(7000 * MB / 1e12)


# Steps


def test_sums_hide_behind_passes_but_for_the_last() -> None:
    sums = tuple(Message("all_reduce", (0, 1), nbytes) for nbytes in (2000 * MB, 500 * MB))
    cluster = plan_cluster(1, 2)
    each = [2 * (1e-6 + message.nbytes / 2 / 100e9) for message in sums]
    found = step(replace(RANK, messages=sums), cluster=cluster)
    assert found.communication == pytest.approx(max(each[1], sum(each) - HIDDEN * found.compute))
    assert found.communication == pytest.approx(each[1])
    slow = step(replace(RANK, messages=sums), cluster=plan_cluster(2, 1))
    assert slow.communication == pytest.approx(2.5001 - HIDDEN * slow.compute, rel=1e-3)
    gathers = (Message("all_gather", (0, 1), 2000 * MB), *sums)
    gathered = step(replace(RANK, messages=gathers), cluster=plan_cluster(2, 1))
    assert gathered.communication == pytest.approx(3.5 - HIDDEN_GATHERS * gathered.compute, rel=1e-3)


def test_messages_within_a_team_do_not_hide() -> None:
    layout = Layout({"data": 2, "tensor": 2})
    within = (Message("all_reduce", (0, 1), 400 * MB),) * 3
    found = step(replace(RANK, messages=within), cluster=plan_cluster(2, 2), layout=layout)
    assert found.shares == (8, 8)
    assert found.communication == pytest.approx(3 * 2 * (1e-6 + 200 * MB / 100e9))


def test_stages_idle_while_the_first_micro_batches_come() -> None:
    stages = [replace(RANK, messages=(Message("send", pair, 8),) * 4) for pair in ((0, 1), (1, 0))]
    found = step(*stages, cluster=plan_cluster(1, 2), layout=Layout({"pipeline": 2}))
    assert found.bubble == pytest.approx(found.compute / 4)


def test_costs_are_those_of_each_stage_and_each_card() -> None:
    """Ranks 0 and 1 are the first stages of two replicas, and 2 and 3 the last, with twice as much to compute."""
    stages = (RANK, replace(RANK, flops=2 * RANK.flops))
    layout = Layout({"pipeline": 2, "data": 2})
    cards = tuple(plan_card(tflops=speed) for speed in (100, 50, 100, 50))
    cluster = Cluster((Machine("", cards, FAST, 0),), FAST)
    costs = costs_of_work(StepWork(Candidate(4, "pipeline"), layout, stages), cluster, "float32", 1.0)
    assert costs.parts == 2
    assert [line(8) for line in costs.compute] == pytest.approx([0.06, 0.12, 0.12, 0.24])


def test_a_rank_without_samples_has_the_costs_of_one() -> None:
    found = step(replace(RANK, samples=0), cluster=plan_cluster(1, 2), batch=1)
    assert found.compute > 0
