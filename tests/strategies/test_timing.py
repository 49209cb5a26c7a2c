from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.balance.throttle import Throttle
from evener.core.config.run_config import RunConfig
from evener.hardware.timers import HostStopwatch, waiting
from evener.strategies.timing import WorkTimer
from evener.training.engine import Engine
from tests import tasks
from tests.observers import Remembering


class Clock:
    """Goes forward when something sleeps or works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pace_of(clock: Clock, throttle: Throttle | None, rank: int = 0) -> WorkTimer:
    return WorkTimer(HostStopwatch(clock), throttle, rank, sleep=clock.pass_)


def test_without_a_throttle_nothing_sleeps(clock: Clock) -> None:
    work_timer = pace_of(clock, None)
    with work_timer.step(0):
        clock.pass_(3)
        work_timer.work_done()
        clock.pass_(5)
    assert (work_timer.taken().value(), clock.now) == (3, 8)


def test_a_step_lasts_until_others_have_been_waited_for(clock: Clock) -> None:
    work_timer = pace_of(clock, None)
    for work in (3, 4):
        with work_timer.step(0):
            with waiting():
                clock.pass_(10)
            clock.pass_(work)
            work_timer.work_done()
            clock.pass_(5)
        clock.pass_(7)
        assert (work_timer.taken().value(), work_timer.elapsed().value()) == (work, 10 + work + 5)


def test_a_throttled_rank_sleeps_in_proportion_to_its_work_and_not_to_its_waiting(clock: Clock) -> None:
    work_timer = pace_of(clock, Throttle.parse("1,0.25", ["7:1:0.5"], 2), rank=1)
    for step, expected in ((6, 12), (7, 6)):
        with work_timer.step(step):
            clock.pass_(2)
            with waiting():
                clock.pass_(100)
            clock.pass_(1)
            work_timer.work_done()
        assert work_timer.taken().value() == expected


def test_a_throttled_rank_comes_late_to_each_wait_within_its_passes(clock: Clock) -> None:
    """A layer in which ranks meet: each part of the work is stretched by itself, and none twice."""
    throttle = Throttle.parse("1,0.25", ["7:1:0.5"], 2)
    work_timer = pace_of(clock, throttle, 1)
    for step, factor in ((6, 4), (7, 2)):
        with work_timer.step(step):
            began = clock.now
            clock.pass_(2)
            with waiting():
                assert clock.now - began == 2 * factor
                with waiting():
                    clock.pass_(100)
            clock.pass_(1)
            with waiting():
                assert clock.now - began == 3 * factor + 100
            work_timer.work_done()
            assert clock.now - began == 3 * factor + 100
            clock.pass_(8)
            with waiting():
                clock.pass_(2)
        assert work_timer.taken().value() == 3 * factor
        assert work_timer.elapsed().value() == 3 * factor + 110


def test_work_that_ends_several_times_is_stretched_once(clock: Clock) -> None:
    """Two backward passes in a loop of the user's own."""
    work_timer = pace_of(clock, Throttle((0.5,)))
    with work_timer.step(0):
        clock.pass_(2)
        work_timer.work_done()
        work_timer.work_done()
        assert clock.now == 4
        clock.pass_(1)
        work_timer.work_done()
    assert work_timer.taken().value() == clock.now == 6


DELAY_SECONDS = 0.04


class LateOnRankOne(nn.Module):
    """Rank 1 comes late to every layer."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.distributed.get_rank() == 1:
            time.sleep(DELAY_SECONDS)
        return x


def least_seconds(layers: list[Any], by_hand: bool = False, **settings: Any) -> list[float]:
    """The least time of each rank's own work over some steps."""
    seen = Remembering()
    task = tasks._task(model=lambda: nn.Sequential(*[layer() for layer in layers]))
    config = RunConfig(device="cpu", steps=6, batch_size=12, **settings)
    with Engine(task, config, observers=[seen]) as engine:
        for batch in engine.batches():
            if by_hand:
                (micro,) = batch.micro_batches
                total = engine.loss.total(engine.model(micro.inputs), micro.targets)
                engine.backward(total, len(micro.samples))
                engine.update()
            else:
                engine.step(batch)
        if by_hand:
            observed: Any = engine.balancer
            return [min(times) for times in zip(*(seconds for *_, seconds in observed.observed), strict=True)]
    return [min(times) for times in zip(*(step.compute_seconds for step in seen.steps), strict=True)]


LINEAR = [lambda: nn.Linear(6, 3)]
NORMALIZED = [lambda: nn.Linear(6, 4), LateOnRankOne, lambda: nn.BatchNorm1d(4), lambda: nn.Linear(4, 3)]


@pytest.mark.parametrize(
    ("layers", "settings"),
    [
        ([LateOnRankOne, *LINEAR], {}),
        ([LateOnRankOne, *LINEAR], {"allreduce": "native"}),
        (NORMALIZED, {}),
        (NORMALIZED, {"micro_batch": 6}),
    ],
    ids=["bucket", "asynchronous bucket", "batch norm", "micro-batches"],
)
def test_a_rank_that_waits_for_a_late_one_has_not_worked(
    ranks: Any, layers: list[Any], settings: Any
) -> None:
    for waiter, late in ranks(2).run(least_seconds, layers, **settings):
        assert waiter < DELAY_SECONDS <= late


def test_nor_has_it_in_a_loop_by_hand(ranks: Any) -> None:
    for waiter, late in ranks(2).run(
        least_seconds, [LateOnRankOne, *LINEAR], by_hand=True, balance="tests.balancers:Even"
    ):
        assert waiter < DELAY_SECONDS <= late


@pytest.mark.parametrize("settings", [{}, {"micro_batch": 6}], ids=str)
def test_a_throttled_rank_looks_slow_to_all(ranks: Any, settings: dict[str, Any]) -> None:
    for quick, slow in ranks(2).run(least_seconds, LINEAR, throttle="1,0.02", balance="equal", **settings):
        assert slow > 5 * quick


def test_one_rank_can_be_throttled() -> None:
    """There is no bucket to hold back. The machine may do other work in one of the runs without."""
    (seconds,) = least_seconds(LINEAR, throttle="0.02")
    quick = min(least_seconds(LINEAR)[0] for _ in range(3))
    assert seconds > 5 * quick
