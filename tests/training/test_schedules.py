"""PyTorch's schedules with warm-up: the same rates on any ranks, also after a resume in mid-schedule."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.training.engine import Engine
from tests import tasks
from tests.engines import Weights, assert_same, copied

STEPS, WARM_UP = 18, 4
"""Three epochs of 47 samples in batches of 8; 30 samples of warm-up."""


def schedule(optimizer: Optimizer) -> LRScheduler:
    rise = LinearLR(optimizer, start_factor=0.01, total_iters=WARM_UP)
    fall = CosineAnnealingLR(optimizer, T_max=STEPS - WARM_UP)
    return SequentialLR(optimizer, [rise, fall], milestones=[WARM_UP])


def warmed() -> Task:
    return tasks._task(scheduler=schedule, scheduler_interval="step", batch_size=8)


EXPECTED = [0.1 * (0.01 + 0.99 * step / WARM_UP) for step in range(WARM_UP)]
EXPECTED += [0.05 * (1 + math.cos(math.pi * step / (STEPS - WARM_UP))) for step in range(STEPS - WARM_UP)]


def trained(
    place: Path, steps: int | None = None, resume: bool = False, **settings: Any
) -> tuple[list[float], Weights]:
    """The learning rate of each step, and the weights. Saves at the end."""
    with Engine(warmed(), RunConfig(dtype="float64", device="cpu", epochs=3, **settings)) as engine:
        if resume:
            engine.load(place, tell=lambda message: None)
        rates = []
        for batch in itertools.islice(engine.batches(), steps):
            rates.append(engine.learner.optimizer.param_groups[0]["lr"])
            engine.step(batch)
        engine.save(place)
        return rates, copied(engine)


@pytest.mark.parametrize("done", [2, WARM_UP, 11])
def test_a_schedule_goes_on_where_it_was_on_other_ranks(ranks: Any, tmp_path: Path, done: int) -> None:
    reference, weights = trained(tmp_path / "one")
    assert reference == pytest.approx(EXPECTED)
    place = tmp_path / "several"
    on_two = ranks(2).run(trained, place, done, balance="2,1")
    on_one, resumed = trained(place, resume=True)
    assert on_two[0][0] == on_two[1][0]
    assert on_two[0][0] + on_one == reference
    assert_same(resumed, weights)


def test_replicas_follow_the_schedule_of_their_batches(ranks: Any, tmp_path: Path) -> None:
    local = {"strategy": "local_sgd", "strategy_option": ("sync_every=3", "replicas=2")}
    one, weights = trained(tmp_path / "one", **local)
    two = ranks(2).run(trained, tmp_path / "two", **local)
    assert [rates for rates, _ in two] == [one, one]
    assert one == pytest.approx(EXPECTED[::3])
    assert_same(two[0][1], weights)
