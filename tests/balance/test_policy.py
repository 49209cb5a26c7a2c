from __future__ import annotations

import pytest

from evener.balance.policy import Policy, judge, learned_lines
from evener.balance.speed import SpeedModel
from evener.balance.time_model import Line
from evener.errors import ConfigurationError


def taught(line: Line, *sizes: int) -> SpeedModel:
    model = SpeedModel()
    for n in sizes * 20:
        model.observe(n, line(n))
    return model


SLOW, FAST = Line(0.004, 0.0008), Line(0.004, 0.0002)


def test_only_ranks_that_gain_work_are_in_doubt() -> None:
    models = [taught(SLOW, 64), taught(FAST, 48, 64, 96)]
    relief = judge(models, (SLOW, FAST), [64, 64], [32, 96])
    assert relief.gain == pytest.approx(1 - SLOW(32) / SLOW(64))
    assert relief.error < 0.05
    models = [taught(SLOW, 48, 64), taught(FAST, 64)]
    assert judge(models, (SLOW, FAST), [64, 64], [32, 96]).error > 3 * relief.error


def test_a_rank_never_observed_is_taken_for_an_average_one() -> None:
    assert learned_lines([SpeedModel(), SpeedModel()]) == (Line(0.0, 1.0),) * 2
    models = [taught(SLOW, 32, 64), SpeedModel(), taught(FAST, 32, 64)]
    slow, unknown, fast = (line(64) for line in learned_lines(models))
    assert unknown == pytest.approx((slow + fast) / 2)


def test_probes_are_the_seldomer_the_more_they_cost() -> None:
    policy = Policy(probe_cost=0.01, probe_every_steps=(32, 2000))
    assert [policy.probe_interval(excess) for excess in (-0.5, 0.1, 1.0, 1e9)] == [32, 32, 100, 2000]


@pytest.mark.parametrize(
    "wrong",
    [
        {"every_steps": 0},
        {"warmup_steps": -1},
        {"settle_steps": 0},
        {"calibration_spread": 1.0},
        {"probe_cost": 0.0},
        {"probe_every_steps": (10, 5)},
    ],
)
def test_a_policy_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        Policy(**wrong)
