"""Seconds of messages and passes on cards and links, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evener.balance.time_model import Line
from evener.distributed.mesh import Layout
from evener.errors import ConfigurationError
from evener.tools.estimate.traffic import CONVOLUTIONS, Message
from evener.tools.plan.analytic import (
    EFFICIENCY,
    HIDDEN,
    HIDDEN_GATHERS,
    MEASURED_EFFICIENCY,
    START_SECONDS,
    all_reduces_of,
    computed_in,
    costs_of_work,
    speed_of,
    update_seconds,
)
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.cluster import Cluster, Machine
from evener.tools.plan.costs import StepTime, step_time
from evener.tools.plan.message_times import MessageTimes
from evener.tools.plan.work import RankWork, StepWork
from tests.tools.plan.models import FAST, SLOW, plan_card, plan_cluster

MB = 1_000_000
RANK = RankWork(8, {"float32": int(6e12)}, 1000, 0, (), 1000 * MB, 2000 * MB, 4000 * MB)


def step(*ranks: RankWork, cluster: Cluster, layout: Layout | None = None, batch: int = 16) -> StepTime:
    layout = layout or Layout({"data": 2})
    found = StepWork(Candidate(layout.world_size, "ddp"), layout, ranks)
    return step_time(costs_of_work(found, cluster, None, 1.0), batch)


# Passes and the update


def test_passes_take_operations_over_the_speed_and_bytes_over_the_bandwidth() -> None:
    rank = replace(RANK, moved=int(3e9), operators=0)
    found = step(rank, cluster=plan_cluster(1, 2))
    assert found.compute == pytest.approx(6e12 / 100e12 + 3e9 / 1e12)
    assert found.update == pytest.approx((3 * 1000 + 2 * 2000) * MB / 1e12)
    assert found.seconds == pytest.approx(found.compute + found.update)
    assert step(rank, cluster=plan_cluster(1, 2), batch=32).compute == pytest.approx(2 * found.compute)


def test_a_card_is_never_faster_than_its_host_starts_operators() -> None:
    small = replace(RANK, flops={"float32": 1000}, operators=5000)
    assert step(small, cluster=plan_cluster(1, 2)).compute == pytest.approx(5000 * START_SECONDS)
    cpu = Machine("", (replace(plan_card(), kind="cpu"),) * 2, FAST, 0)
    assert step(small, cluster=Cluster((cpu,), FAST)).compute < 1e-9, "there the operators are the work"


def test_a_type_that_a_card_does_not_compute_is_refused_in_words() -> None:
    with pytest.raises(ConfigurationError, match="of the speed of card in float16; known are float32"):
        speed_of(plan_card(), "float16")


def test_products_take_the_speeds_of_their_types() -> None:
    """PyTorch computes matrices of float32 in float32 unless it is told otherwise, and convolutions in TF32."""
    card = replace(plan_card(), flops={"float32": 1e12, "tf32": 8e12, "bfloat16": 16e12})
    cluster = Cluster((Machine("", (card,) * 2, FAST, 0),), FAST)
    flops = {"float32": int(1e12), CONVOLUTIONS: int(8e12), "bfloat16": int(16e12)}
    found = StepWork(Candidate(2, "ddp"), Layout({"data": 2}), (replace(RANK, flops=flops, operators=0),))

    def seconds(precision: str | None) -> float:
        return step_time(costs_of_work(found, cluster, precision, 1.0), 16).compute

    assert seconds(None) == pytest.approx(1 + 1 + 1)
    assert seconds("fp32") == pytest.approx(1 + 8 + 1)
    assert seconds("tf32") == pytest.approx(1 / 8 + 1 + 1)
    without = replace(card, flops={"float32": 1e12, "bfloat16": 16e12})
    assert computed_in(CONVOLUTIONS, without, None) == "float32"


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
    stages = (RANK, replace(RANK, flops={"float32": 2 * RANK.flops["float32"]}))
    layout = Layout({"pipeline": 2, "data": 2})
    cards = tuple(plan_card(tflops=speed) for speed in (100, 50, 100, 50))
    cluster = Cluster((Machine("", cards, FAST, 0),), FAST)
    costs = costs_of_work(StepWork(Candidate(4, "pipeline"), layout, stages), cluster, None, 1.0)
    assert costs.parts == 2
    assert [line(8) for line in costs.compute] == pytest.approx([0.06, 0.12, 0.12, 0.24])


def test_a_rank_without_samples_has_the_costs_of_one() -> None:
    found = step(replace(RANK, samples=0), cluster=plan_cluster(1, 2), batch=1)
    assert found.compute > 0


# All-reduces


def cpu_cluster(machines: int, each: int = 1) -> Cluster:
    cpu = Machine("", (replace(plan_card(), kind="cpu"),) * each, FAST, 0)
    return Cluster((cpu,) * machines, SLOW)


def test_each_all_reduce_is_another_term_of_the_same_step() -> None:
    sums = tuple(Message("all_reduce", tuple(range(8)), 4 * MB) for _ in range(3))
    work = StepWork(Candidate(8, "ddp"), Layout({"data": 8}), (replace(RANK, messages=sums),))
    cluster = cpu_cluster(8)
    costs, times = costs_of_work(work, cluster, None, 1.0), MessageTimes(cluster)
    found = all_reduces_of(work, costs, cluster)
    assert list(found) == ["ring", "tree", "halving", "direct", "ring-tree", "two-level"]
    for name, other in found.items():
        one = times.seconds(sums[0], name)
        assert other == replace(costs, rest=Line(pytest.approx(3 * one), 0.0), exposed=one)  # type: ignore[arg-type]


def test_only_gradients_that_all_ranks_get_have_a_choice() -> None:
    within = StepWork(
        Candidate(2, "tensor"),
        Layout({"tensor": 2}),
        (replace(RANK, messages=(Message("all_reduce", (0, 1), MB),)),),
    )
    owners = replace(within, candidate=Candidate(2, "sharded"), layout=Layout({"data": 2}))
    for work in (within, owners):
        costs = costs_of_work(work, plan_cluster(2, 1), None, 1.0)
        assert all_reduces_of(work, costs, plan_cluster(2, 1)) == {}
