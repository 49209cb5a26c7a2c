"""Trials on ranks of this machine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from benchmarks.drawn import rand
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.measured import unclear
from evener.tools.plan.rounds import LEAST_STEPS
from evener.tools.plan.sum_trials import SumTimes
from evener.tools.plan.trial import Trial
from evener.tools.plan.trials import Refusal, run_trials
from tests.tools.plan.models import classes_task, mlp

CONFIG = RunConfig(device="cpu")
ONE, TWO = Candidate(1, "single"), Candidate(2, "ddp")


class Refusing(nn.Linear):
    """Bears only whole batches of 8."""

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) != 8:
            raise ValueError(f"{len(inputs)} samples are not 8")
        return super().forward(inputs)


def small(model: type[nn.Linear] = nn.Linear) -> Task:
    data = TensorDataset(rand(36, 4), rand(36, 2))
    return Task(
        model=lambda: model(4, 2),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        train=data,
        batch_size=8,
    )


def refusing() -> Task:
    return small(Refusing)


def test_trials_alternate_and_have_only_whole_batches() -> None:
    """The last batch of each epoch has 4 samples."""
    found = run_trials(small, None, CONFIG, [[(ONE, 8), (ONE, 4)], [(ONE, 8), (ONE, 16)]], 0.02, 60.0)
    trials = [each for each in found if isinstance(each, Trial)]
    assert [each.batch_size for each in trials][:4] == [8, 4, 8, 16]
    assert [(ONE, each.batch_size) for each in trials[4:]] == unclear(trials[:4])
    for each in trials:
        assert each.shares == (each.batch_size,)
        assert len(each.steps) >= LEAST_STEPS // 2
        assert 0 < each.compute[0] < each.seconds < each.setup
        assert each.pace == pytest.approx(each.seconds / each.batch_size)


def test_without_time_it_is_a_reason() -> None:
    found = run_trials(small, None, CONFIG, [[(ONE, 8)]], 0.02, -1.0)
    assert [type(each) for each in found] == [Refusal]
    assert "time" in found[0].reason  # type: ignore[union-attr]


def test_an_error_of_the_model_is_a_reason() -> None:
    (found,) = run_trials(refusing, None, CONFIG, [[(ONE, 12)]], 0.02, 60.0)
    assert isinstance(found, Refusal)
    assert "12 samples are not 8" in found.reason


def test_a_size_besides_is_left_out_alone() -> None:
    def bears_few() -> Task:
        return replace(refusing(), train=TensorDataset(rand(32, 4), rand(32, 2)))

    found = run_trials(bears_few, None, CONFIG, [[(ONE, 8), (ONE, 4)], [(ONE, 8), (ONE, 16)]], 0.02, 60.0)
    assert {each.batch_size for each in found if isinstance(each, Trial)} == {8}
    assert not [each for each in found if isinstance(each, Refusal)]


def test_a_batch_has_no_more_samples_than_there_are() -> None:
    found = run_trials(small, None, CONFIG, [[(ONE, 100)]], 0.02, 60.0)
    assert {each.batch_size for each in found if isinstance(each, Trial)} == {36}


@pytest.mark.slow
def test_ranks_try_what_they_can_and_say_why_they_cannot() -> None:
    experts = Candidate(2, "experts")
    found = run_trials(small, None, CONFIG, [[(TWO, 8), (experts, 8), (TWO, 4)]] * 2, 0.02, 60.0)
    trials = [each for each in found if isinstance(each, Trial)]
    assert [each.shares for each in trials][:4] == [(4, 4), (2, 2)] * 2
    assert all(len(each.compute) == len(each.input) == 2 for each in trials)
    (refusal,) = (each for each in found if isinstance(each, Refusal))
    (sums,) = (each for each in found if isinstance(each, SumTimes))
    assert (sums.ranks, sums.total_nbytes) == (2, 4 * 10)
    assert {"native", "ring", sums.default} <= set(sums.seconds)
    assert all(0 < times[40] < 10 for times in sums.seconds.values())
    assert refusal.candidate == experts
    assert "evener.nn.Experts" in refusal.reason


@pytest.mark.slow
def test_an_error_of_the_model_on_all_ranks_is_a_reason_and_trials_go_on() -> None:
    """Each of two ranks gets half of a batch, and the last of an epoch has 4 samples."""
    ways = [TWO, replace(TWO, strategy="sharded")]
    found = run_trials(refusing, None, CONFIG, [[(way, 12) for way in ways]], 0.0, 60.0)
    reasons = {each.candidate: each.reason for each in found if isinstance(each, Refusal)}
    assert "6 samples are not 8" in reasons.pop(TWO)
    assert "6 samples are not 8" in reasons.popitem()[1]
    assert not reasons


class Normalized(nn.Sequential):
    """Layers that look at several samples: a pipeline does not cut its batches."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))


@pytest.mark.slow
def test_a_pipeline_says_into_how_many_micro_batches_it_cuts() -> None:
    way, sizes = Candidate(2, "pipeline", ("balance=equal",)), (8, 2)
    for model, expected in ((mlp, [4, 2]), (Normalized, [1, 1])):
        task = partial(classes_task, model, 16)
        found = run_trials(task, None, CONFIG, [[(way, size) for size in sizes]], 0.0, 60.0)
        assert [each.pieces for each in found if isinstance(each, Trial)][:2] == expected
