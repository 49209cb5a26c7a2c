"""What a plan advises, on clusters that are not at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.errors import ConfigurationError
from evener.tools.estimate.estimate import estimate_ranks
from evener.tools.estimate.rank import RankPeak
from evener.tools.plan.cluster import Cluster, Machine, PlannedLink
from evener.tools.plan.cluster_file import read_cluster
from evener.tools.plan.for_cluster import plan_for_cluster
from evener.tools.plan.local_steps_way import SYNC_EVERY
from evener.tools.plan.result import TrainingPlan, Way
from evener.tools.plan.text import plan_text
from tests.tools.plan.models import FAST, adam, classes_task, language_task, mlp, plan_card

HERE = Path(__file__).parent
GIB = 1 << 30


def cluster(tmp_path_factory: pytest.TempPathFactory, text: str) -> Cluster:
    path = tmp_path_factory.mktemp("cluster") / "cluster.toml"
    path.write_text(text)
    return read_cluster(path)


def machines(card: str, count: int = 1, cards: int = 1, between: str = "100 Gbit/s", more: str = "") -> str:
    text = f'[[machines]]\ncount = {count}\ncard = "{card}"\ncards_per_machine = {cards}\n{more}\n'
    return f'between = "{between}"\n{text}' if count > 1 else text


def wide(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def way(plan: TrainingPlan, strategy: str, ranks: int, **fields: Any) -> Way:
    found = [
        each
        for each in plan.ways
        if each.candidate.strategy == strategy
        and each.candidate.ranks == ranks
        and all(getattr(each.candidate, name) == value for name, value in fields.items())
    ]
    assert len(found) == 1, [each.candidate.words for each in plan.ways]
    return found[0]


# Memory


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> TrainingPlan:
    """2.4 billion weights, which take 38 GB with AdamW, on four cards of 24 GB."""
    task = classes_task(lambda: wide(20_000, 6), 20_000, 16, adam)
    return plan_for_cluster(lambda: task, cluster(tmp_path_factory, machines("RTX 3090", cards=4)))


@pytest.mark.slow
def test_what_is_too_large_for_a_card_is_divided(large: TrainingPlan) -> None:
    best = large.best
    assert best is not None
    assert best.candidate.strategy != "ddp"
    assert best.fits
    plain = way(large, "ddp", 4)
    assert not plain.fits
    assert plain.needed > 4 * 4 * 2.4e9  # type: ignore[operator]
    assert plain.limit < 24 * GIB  # type: ignore[operator]


@pytest.mark.slow
def test_the_plan_says_by_how_much_something_does_not_fit(large: TrainingPlan) -> None:
    lines = plan_text(large).splitlines()
    plain = next(line for line in lines if line.startswith("does not fit: ddp --processes 4"))
    assert "GiB more than there is" in plain


@pytest.mark.slow
def test_what_does_not_fit_is_not_tried_on_fewer_cards(large: TrainingPlan) -> None:
    for words in ("ddp --processes 2", "ddp --processes 3", "single --processes 1"):
        assert "more than there is, as on more ranks" in large.refused[words]
    assert next(each.ranks for each in large.curve()) > 1


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> TrainingPlan:
    """Activations of 393,216 words take more than a card of 12 GB has, weights next to nothing."""
    task = language_task(1000, 256, 2, 4096, 192)
    return plan_for_cluster(
        lambda: task, cluster(tmp_path_factory, machines("RTX 3060", cards=2)), strategy="ddp"
    )


@pytest.mark.slow
def test_activations_that_do_not_fit_lead_to_less_memory(long: TrainingPlan) -> None:
    plain = way(long, "ddp", 2, micro_batch=None, recompute=None)
    assert not plain.fits
    assert "as on more ranks" in long.refused["ddp --processes 1"]
    again = way(long, "ddp", 2, micro_batch=None, recompute="blocks")
    pieces = way(long, "ddp", 2, micro_batch=192 // 8, recompute=None)
    assert plain.needed > again.needed > pieces.needed  # type: ignore[operator]
    assert again.time.compute > 1.1 * plain.time.compute > pieces.time.compute
    assert pieces.fits
    assert long.best == pieces


@pytest.mark.slow
def test_unequal_cards_own_parts_by_their_memory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """1.2 billion weights take 4.8 GB on each card, as do gradients; the moments of AdamW, 9.6 GB, are divided."""
    task = classes_task(lambda: wide(20_000, 3), 20_000, 16, adam)
    pair = cluster(tmp_path_factory, '[[machines]]\ncards = ["RTX 3090", "RTX 3080"]')
    options = ("zero=2",)
    plan = plan_for_cluster(lambda: task, pair, strategy="sharded", strategy_option=options, processes=2)
    found = way(plan, "sharded", 2, micro_batch=None)
    assert found.candidate.options == ("zero=2", "shard_sizes=21,8")
    assert found.limit is not None
    assert found.needed is not None
    assert found.limit < 10 * GIB, "the smaller card lacks the most"
    whole, moments = 4 * 1.2e9, 8 * 1.2e9
    assert whole + moments * 8 / 29 < found.needed < 2 * whole + moments * 8 / 29 + GIB
    assert whole + moments / 2 + whole / 2 > found.limit, "equal parts would not fit at all"


def test_a_rank_with_more_samples_needs_more_memory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The second card is faster and has less memory. What it needs is counted with the samples that it gets."""

    def channels() -> nn.Module:
        """Activations of 8 MiB for each sample."""
        return nn.Sequential(
            nn.Unflatten(1, (1, 2048)), nn.Conv1d(1, 1024, 1), nn.ReLU(), nn.Conv1d(1024, 1, 1), nn.Flatten()
        )

    task = classes_task(channels, 2048, 512)
    pair = cluster(tmp_path_factory, '[[machines]]\ncards = ["RTX 3060", "RTX 3080"]')
    found = {
        balance: way(
            plan_for_cluster(lambda: task, pair, strategy="ddp", micro_batch=512, balance=balance),
            "ddp",
            2,
        )
        for balance in ("equal", "1,3", "3,1", None)
    }
    small, large = found["equal"].limit or 0, found["3,1"].limit or 0
    assert small < 8.5 * GIB < large
    assert {name: each.limit for name, each in found.items()} == {
        "equal": small,
        "1,3": small,
        "3,1": large,
        None: small,
    }
    needed = {name: each.needed or 0 for name, each in found.items()}
    assert needed["1,3"] == needed["3,1"] > 1.4 * needed["equal"]
    assert found[None].time.shares[1] > 1.5 * found[None].time.shares[0]
    assert needed["1,3"] > needed[None] > 1.2 * needed["equal"]


def test_weights_of_another_number_of_ranks_are_no_error_of_the_plan(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    task = classes_task(mlp, 16)
    pair = cluster(tmp_path_factory, machines("RTX 3090", cards=2))
    plan = plan_for_cluster(lambda: task, pair, balance="1,3")
    assert way(plan, "ddp", 2).time.shares == (4, 12)
    assert "2 weights" in plan.refused["tensor --processes 2"]


# Speed


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> TrainingPlan:
    task = classes_task(mlp, 16)
    text = machines("RTX 3090", cards=2, more="price_per_hour = 0.5")
    return plan_for_cluster(lambda: task, cluster(tmp_path_factory, text))


def test_one_card_is_faster_than_two_for_what_is_small(small: TrainingPlan) -> None:
    assert [each.ranks for each in (small.enough(),) if each] == [1]
    assert [each.candidate.words for each in (small.best,) if each] == ["single --processes 1"]
    assert "more than 1 are slower: with 2" in plan_text(small)


def test_a_step_takes_no_more_samples_than_there_are(tmp_path_factory: pytest.TempPathFactory) -> None:
    cards = cluster(tmp_path_factory, machines("RTX 3090"))
    large, whole = (
        plan_for_cluster(lambda: classes_task(mlp, 16), cards, batch_size=size) for size in (10_000, 512)
    )
    assert large.batch_size == 512
    assert [each.time for each in large.ways] == [each.time for each in whole.ways]
    assert "the data set has 512 samples, fewer than a batch of 10000: a step takes all" in large.notes


def test_only_machines_that_are_used_cost(tmp_path_factory: pytest.TempPathFactory) -> None:
    task = classes_task(mlp, 16)
    ten = cluster(tmp_path_factory, machines("RTX 3090", 10, 2, more="price_per_hour = 1.5"))
    assert plan_for_cluster(lambda: task, ten, processes=1).price_per_hour == 1.5
    plan = plan_for_cluster(lambda: task, ten, strategy="ddp", processes=3, steps=2**30, batch_size=1)
    assert plan.best is not None
    assert plan.best.candidate.ranks == 1
    hours = 2**30 * plan.best.time.seconds / 3600
    assert f"at 1.5 an hour this costs {1.5 * hours:.2f}" in plan_text(plan)


def test_a_plan_says_what_its_speeds_come_from_and_what_it_costs(small: TrainingPlan) -> None:
    assert small.notes == ("speeds are those of a catalogue and not measured",)
    assert small.devices == ("RTX 3090", "RTX 3090")
    assert small.price_per_hour == 0.5
    epoch = small.epoch_seconds(small.best) if small.best else None
    assert epoch is not None
    assert f"at 0.5 an hour this costs {0.5 * epoch / 3600:.2f}" in plan_text(small)
    assert small.as_json()["ways"][0]["measured"] is False


def test_embeddings_send_more_than_they_compute(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The gradient of each row is sent, and few rows are computed with."""
    task = language_task(500_000, 64, 0, 8, 16)
    plan = plan_for_cluster(
        lambda: task, cluster(tmp_path_factory, machines("RTX 3090", 2, between="10 Gbit/s")), strategy="ddp"
    )
    two = way(plan, "ddp", 2).time
    assert two.largest()[0] == "communication"
    assert two.communication > 0.5 * two.seconds
    weights = 4 * (2 * 500_000 * 64 + 500_000)
    assert two.communication > 0.8 * weights / 1.25e9
    assert [each.candidate.ranks for each in (plan.best,) if each] == [1]


@pytest.fixture(scope="module")
def slow_link(tmp_path_factory: pytest.TempPathFactory) -> TrainingPlan:
    task = language_task(100, 512, 4, 1024, 32)
    text = machines("RTX 3090", 4, between="1 Gbit/s")
    return plan_for_cluster(lambda: task, cluster(tmp_path_factory, text), strategy="ddp")


def test_on_a_slow_link_local_steps_are_proposed_as_another_algorithm(slow_link: TrainingPlan) -> None:
    other = way(slow_link, "diloco", 4)
    assert other.algorithm == f"replicas merge every {SYNC_EVERY} batches"
    assert other.candidate.options == (f"sync_every={SYNC_EVERY}",)
    plain = way(slow_link, "ddp", 4)
    assert other.time.seconds < plain.time.seconds / 5
    sent = plain.costs.rest(32)
    assert other.time.communication == pytest.approx(sent / SYNC_EVERY)
    assert [each.algorithm for each in (slow_link.best,) if each] == [""]


def test_the_text_says_how_much_faster_another_algorithm_is(slow_link: TrainingPlan) -> None:
    text = plan_text(slow_link)
    one, other = way(slow_link, "ddp", 1).time.seconds, way(slow_link, "diloco", 4).time.seconds
    assert f"another algorithm, replicas merge every {SYNC_EVERY} batches" in text
    assert f"this on 4: {one / other:.1f}x" in text


@pytest.mark.parametrize("balance", [None, "auto", "equal"])
def test_unequal_cards_get_shares_by_their_speed(
    balance: str | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    task = classes_task(lambda: wide(2048, 4), 2048, 2048)
    pair = cluster(tmp_path_factory, '[[machines]]\ncards = ["RTX 3090", "RTX 3060"]')
    plan = plan_for_cluster(lambda: task, pair, strategy="ddp", processes=2, balance=balance)
    found = way(plan, "ddp", 2).time
    if balance == "equal":
        assert found.shares == (1024, 1024)
        assert found.waiting > 0.2 * found.compute
    else:
        assert sum(found.shares) == 2048
        assert found.shares[0] > 1.5 * found.shares[1]
        assert found.waiting < 0.01 * found.compute


# All-reduces


ESTIMATES: dict[tuple[str, int], list[RankPeak]] = {}


def estimated_once(
    task: Task, config: RunConfig, ranks: Sequence[int], world_size: int, kind: str
) -> list[RankPeak]:
    """The estimates of `latent`. Evener's own all-reduces leave the settings of an estimate as they are."""
    key = (repr(config), world_size)
    if key not in ESTIMATES:
        ESTIMATES[key] = estimate_ranks(task, config, ranks, world_size, kind)
    return ESTIMATES[key]


def latent(allreduce: str | None = None) -> TrainingPlan:
    """A small model on 4 CPUs, whose messages are all latency."""
    cpu = replace(plan_card(), kind="cpu")
    machines = (Machine("", (cpu,), FAST, 0),) * 4
    task, slow = classes_task(mlp, 16, 64), Cluster(machines, PlannedLink(1e-3, 1e9))
    with mock.patch("evener.tools.plan.work.estimate_ranks", estimated_once):
        return plan_for_cluster(lambda: task, slow, strategy="ddp", processes=4, allreduce=allreduce)


def test_a_plan_names_an_all_reduce_that_is_much_faster() -> None:
    found = latent()
    best = way(found, "ddp", 4)
    assert best.candidate.allreduce == "direct"
    assert best.all_reduces["default"] == pytest.approx(6e-3, rel=0.1)
    assert best.all_reduces["direct"] == best.time.communication == pytest.approx(1e-3, rel=0.1)
    assert "--strategy ddp --allreduce direct --processes 4" in plan_text(found, top=9)
    assert "communication by all-reduce: direct 1" in plan_text(found, top=9, explain=True)


def test_the_all_reduce_of_the_settings_is_predicted() -> None:
    found = {name: way(latent(name), "ddp", 4) for name in ("ring", "auto", "native")}
    assert found["ring"].candidate.allreduce == "ring"
    assert found["ring"].time.communication == pytest.approx(6e-3, rel=0.1)
    assert found["auto"].candidate.allreduce is None
    assert found["auto"].time.communication == pytest.approx(1e-3, rel=0.1)
    assert found["native"].all_reduces == {}


# What is known of the machines


def test_a_plan_says_that_it_does_not_consider_costs(tmp_path_factory: pytest.TempPathFactory) -> None:
    task = classes_task(mlp, 16)
    plan = plan_for_cluster(
        lambda: replace(task, cost=lambda index: 1.0 + index),
        cluster(tmp_path_factory, machines("RTX 3090", cards=1)),
        strategy="ddp",
    )
    assert (
        plan.notes[-1] == "Task.cost is not considered: a rank's time is predicted by its number of samples"
    )


def test_a_saved_survey_is_a_machine(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(f'[[machines]]\nsurvey = "{HERE / "two_cards.json"}"\n')
    task = classes_task(lambda: wide(4096, 4), 4096, 1024)
    plan = plan_for_cluster(
        lambda: task, read_cluster(tmp_path / "cluster.toml"), strategy="ddp", balance="auto"
    )
    assert plan.notes == (), "all is measured"
    found = way(plan, "ddp", 2)
    one = way(plan, "ddp", 1)
    flops = (6 * 4 - 2) * 4096**2 * 1024
    assert one.time.compute > flops / 2e13
    assert found.time.shares[1] > 1.5 * found.time.shares[0], "the second card is twice as fast"
    assert found.costs.rest(1024) > 4 * 4 * 4096**2 / 1.1e10


def test_a_way_that_the_settings_name_is_the_only_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    task = classes_task(mlp, 16)
    plan = plan_for_cluster(
        lambda: task, cluster(tmp_path_factory, machines("RTX 3090", cards=2)), strategy="tensor"
    )
    assert {each.candidate.strategy for each in plan.ways} == {"tensor"}


def test_without_time_nothing_is_predicted(tmp_path_factory: pytest.TempPathFactory) -> None:
    task = classes_task(mlp, 16)
    with pytest.raises(ConfigurationError, match="there was no time to try it"):
        plan_for_cluster(lambda: task, cluster(tmp_path_factory, machines("RTX 3090")), seconds=-1.0)


def test_more_ranks_than_cards_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    task = classes_task(mlp, 16)
    with pytest.raises(ConfigurationError, match="processes is 3, and the cluster has 2 cards"):
        plan_for_cluster(lambda: task, cluster(tmp_path_factory, machines("RTX 3090", cards=2)), processes=3)


def test_a_type_that_no_card_computes_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    task = classes_task(mlp, 16)
    old = cluster(tmp_path_factory, machines("V100 SXM2 16GB"))
    with pytest.raises(
        ConfigurationError, match="bf16 is not one that the device of rank 0 computes in; it has fp16"
    ):
        plan_for_cluster(lambda: task, old, precision="bf16")
    with pytest.raises(ConfigurationError, match="of the speed of V100 SXM2 16GB in float64"):
        plan_for_cluster(lambda: task, old, dtype="float64")


def test_the_precision_is_that_of_the_cards_and_not_of_this_machine(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    task = classes_task(lambda: wide(4096, 4), 4096, 1024)

    def seconds(card: str, precision: str | None) -> float:
        pair = cluster(tmp_path_factory, machines(card))
        return way(
            plan_for_cluster(lambda: task, pair, strategy="ddp", precision=precision), "ddp", 1
        ).time.seconds

    plain = seconds("A100 SXM 80GB", None)
    assert plain == seconds("A100 SXM 80GB", "fp32")
    for precision in ("tf32", "bf16", "bf16-true", "fp16-true"):
        assert 3 * seconds("A100 SXM 80GB", precision) < plain
    assert seconds("A100 SXM 80GB", "auto") == seconds("A100 SXM 80GB", "bf16")
    assert seconds("T4", "auto") == seconds("T4", "fp16")


def test_a_plan_of_numbers_does_not_know_what_grains_cost(tmp_path_factory: pytest.TempPathFactory) -> None:
    task, cards = classes_task(mlp, 16), cluster(tmp_path_factory, machines("RTX 3090", cards=1))
    with pytest.raises(ConfigurationError, match="leave exact out here, and plan with it on a machine"):
        plan_for_cluster(lambda: task, cards, exact="bits")
