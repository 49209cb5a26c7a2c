"""Steps of the best way of a plan on many ranks, with failures as the cluster's file says."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evener.balance.time_model import Line
from evener.distributed.mesh import Layout
from evener.errors import ConfigurationError
from evener.tools.estimate.traffic import Message
from evener.tools.plan.at_scale import CostAtScale
from evener.tools.plan.best_at_scale import MANY, cost_at_scale
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.checkpoint_interval import daly_interval, expected_goodput
from evener.tools.plan.cluster import Cluster, FailureRates
from evener.tools.plan.cluster_file import read_cluster
from evener.tools.plan.costs import StepCosts, step_time
from evener.tools.plan.for_cluster import plan_for_cluster
from evener.tools.plan.result import Way
from evener.tools.plan.text import plan_text
from evener.tools.plan.work import RankWork, StepWork
from tests.tools.plan.models import FAST, classes_task, language_task, mlp, plan_cluster

DAY = 86_400.0


def cost(
    ranks: int, cluster: Cluster, tensor: int = 1, nbytes: int = 10**9, exposed: float = 0.1
) -> CostAtScale:
    """Ranks that compute for a second and sum ``nbytes``, of which a part cannot hide."""
    group = tuple(range(0, ranks, tensor))
    messages = (Message("all_reduce", group, nbytes), Message("all_reduce", tuple(range(tensor)), 8))
    rank = RankWork(1, {"float32": 1}, 1, 1, messages, 1, 1, 1)
    layout = Layout({"data": ranks // tensor, "tensor": tensor})
    costs = StepCosts(
        (Line(1.0, 0.0),) * ranks, ranks // tensor, rest=Line(1.0, 0.0), hidden=0.5, exposed=exposed
    )
    work = StepWork(Candidate(ranks, "ddp"), layout, (rank,))
    return cost_at_scale(work, Way(work.candidate, step_time(costs, ranks), costs), cluster, ranks)


def calm(machines: int, **failures: Any) -> Cluster:
    return replace(plan_cluster(machines, 8), failures=FailureRates(spread=0.0, **failures))


def test_without_stragglers_ranks_wait_for_no_one() -> None:
    found = cost(128, calm(16), exposed=1.0)
    assert found.ranks == 128
    assert found.waiting_share < 0.01
    low, median, high = found.step_seconds
    assert low == pytest.approx(high, rel=0.01)
    sums = 2 * 7 * (1e-6 + 1e9 / 8 / 100e9) + 2 * (50e-6 * 16 + 1e9 / 1e9)
    assert 1.0 < median < 1.0 + 1.5 * sums


def test_stragglers_make_all_wait() -> None:
    found = cost(128, plan_cluster(16, 8))
    assert found.waiting_share > 0.05
    assert found.step_seconds[0] > cost(128, calm(16)).step_seconds[0]


def test_failures_come_as_often_as_devices_fail() -> None:
    found = cost(
        128, calm(16, mean_days_of_a_device=64.0, checkpoint_stall_seconds=9.0, recovery_seconds=99.0)
    )
    assert found.failures_per_day == pytest.approx(2.0)
    interval = daly_interval(9.0, DAY / 2)
    assert found.checkpoint_interval_seconds == pytest.approx(interval)
    assert found.goodput == pytest.approx(expected_goodput(interval, 9.0, 99.0, DAY / 2))


def test_ranks_of_a_replica_sum_their_own_parts() -> None:
    """Each of eight places sums what it holds; the sum of all passes the machine's connection."""
    whole, divided = cost(128, calm(16), 1, 8 * 10**8), cost(128, calm(16), 8, 10**8)
    assert divided.samples_per_second == pytest.approx(whole.samples_per_second, rel=0.2)


@pytest.mark.nightly
def test_a_hundred_thousand_ranks() -> None:
    found = cost(100_000, plan_cluster(12_500, 8))
    assert found.failures_per_day == pytest.approx(100_000 * 466 / 16_384 / 54)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2_000_000, "kilobytes"


# Plans


def test_a_plan_of_many_ranks_says_what_whole_steps_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MANY < 100, "with so many ranks all would be estimated for seconds here"
    monkeypatch.setattr("evener.tools.plan.for_cluster.MANY", 7)
    task = language_task(100, 128, 1, 512, 1024)
    plan = plan_for_cluster(lambda: task, plan_cluster(2, 4, between=FAST), strategy="ddp")
    assert [each.candidate.ranks for each in (plan.best,) if each] == [8]
    assert plan.at_scale is not None
    assert plan.at_scale.step_seconds[1] > plan.ways[0].time.compute
    assert plan.as_json()["at_scale"]["ranks"] == 8
    text = plan_text(plan)
    assert "on 8 ranks a step takes" in text
    assert "failures a day: a checkpoint every" in text


def test_a_plan_of_few_ranks_does_not() -> None:
    plan = plan_for_cluster(lambda: classes_task(mlp, 16), plan_cluster(1, 1))
    assert plan.at_scale is None
    assert "failures a day" not in plan_text(plan)


# The file


def failures(tmp_path: Path, text: str) -> FailureRates:
    (tmp_path / "cluster.toml").write_text(f'[[machines]]\ncard = "A100 SXM 80GB"\n[failures]\n{text}\n')
    return read_cluster(tmp_path / "cluster.toml").failures


def test_the_file_says_how_often_devices_fail(tmp_path: Path) -> None:
    assert failures(tmp_path, "") == FailureRates()
    text = 'mean_days_of_a_device = 100\ncheckpoint_stall = "500 ms"\nrecovery = "60 s"\nspread = 0.02'
    assert failures(tmp_path, text) == FailureRates(100.0, 0.5, 60.0, 0.02)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mean_days_of_a_device = 0", "failures.mean_days_of_a_device = 0 must be above 0"),
        ("mean_days_of_a_device = -1", "must be at least 0"),
        ('spread = "much"', "failures.spread = 'much' must be a number"),
        ('recovery = "soon"', "failures.recovery = 'soon': 'soon' is no latency"),
        ("stall = 5", "failures.stall is no key"),
    ],
)
def test_what_the_file_may_not_say(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        failures(tmp_path, text)
    assert reason in str(caught.value)
