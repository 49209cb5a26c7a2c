from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest

from evener.tools.plan.checkpoint_interval import daly_interval, expected_goodput, young_interval

MINUTE, HOUR = 60.0, 3600.0
RUNS = [  # stall, recovery and mean time between failures
    pytest.param(5.0, 300.0, 8 * HOUR, id="rare failures"),
    pytest.param(60.0, 600.0, HOUR, id="frequent failures"),
    pytest.param(300.0, 60.0, 20 * MINUTE, id="long stalls"),
]


def simulated_goodput(interval: float, stall: float, recovery: float, mtbf: float, seed: int = 0) -> float:
    """Takes 20,000 intervals, one failure after the other, and looks at the clock."""
    drawn = random.Random(seed)
    clock, left = 0.0, drawn.expovariate(1 / mtbf)
    for _ in range(20_000):
        need = interval + stall
        while left < need:
            clock += left
            left, need = drawn.expovariate(1 / mtbf), interval + stall + recovery
        clock += need
        left -= need
    return 20_000 * interval / clock


@pytest.mark.parametrize(
    ("mtbf", "found"), [(24 * HOUR, 117 * MINUTE), (6 * HOUR, 57 * MINUTE), (15 * MINUTE, 9.1 * MINUTE)]
)
def test_daly_s_own_examples(mtbf: float, found: float) -> None:
    """Figures 3 to 5 of his paper, for a stall of 5 minutes."""
    assert daly_interval(5 * MINUTE, mtbf) == pytest.approx(found, rel=0.01)


def test_young_s_formula() -> None:
    assert young_interval(2.0, 100.0) == 20.0
    assert daly_interval(1e-3, 1e6) == pytest.approx(young_interval(1e-3, 1e6), rel=1e-4)


@pytest.mark.parametrize(("stall", "recovery", "mtbf"), RUNS)
def test_goodput_is_what_random_failures_leave(stall: float, recovery: float, mtbf: float) -> None:
    for factor in (0.3, 1.0, 3.0):
        interval = factor * young_interval(stall, mtbf)
        simulated = simulated_goodput(interval, stall, recovery, mtbf)
        assert expected_goodput(interval, stall, recovery, mtbf) == pytest.approx(simulated, rel=0.02)


@pytest.mark.parametrize(("stall", "recovery", "mtbf"), RUNS)
def test_no_other_interval_is_much_better_where_failures_are_simulated(
    stall: float, recovery: float, mtbf: float
) -> None:
    daly = daly_interval(stall, mtbf)
    best = max(
        simulated_goodput(daly * 2**power, stall, recovery, mtbf) for power in np.arange(-1.5, 1.6, 0.5)
    )
    assert simulated_goodput(daly, stall, recovery, mtbf) > 0.98 * best
    assert expected_goodput(daly / 8, stall, recovery, mtbf) < 0.98 * best


@pytest.mark.parametrize(("stall", "recovery", "mtbf"), RUNS)
def test_the_higher_order_is_nearer_to_the_best_interval(stall: float, recovery: float, mtbf: float) -> None:
    grid = daly_interval(stall, mtbf) * np.exp(np.linspace(-1.5, 1.5, 3001))
    best = max(grid.tolist(), key=lambda interval: expected_goodput(interval, stall, recovery, mtbf))
    assert daly_interval(stall, mtbf) == pytest.approx(best, rel=0.01)
    assert abs(young_interval(stall, mtbf) - best) > abs(daly_interval(stall, mtbf) - best)


def test_goodput_falls_with_everything_that_costs_time() -> None:
    falling = [
        expected_goodput(600, stall, recovery, mtbf)
        for stall, recovery, mtbf in [(0, 0, 1e9), (5, 0, 1e9), (5, 100, 1e4), (50, 100, 1e4), (50, 100, 1e3)]
    ]
    assert falling[0] == pytest.approx(1.0, abs=1e-6)
    assert all(before > after for before, after in pairwise(falling))


def test_where_no_checkpoint_is_ever_completed_nothing_counts() -> None:
    assert daly_interval(stall=300.0, mtbf=100.0) == 100.0
    assert expected_goodput(100.0, 3e5, 0.0, 100.0) == 0.0


@pytest.mark.parametrize(("stall", "mtbf"), [(-1.0, 10.0), (1.0, 0.0), (math.nan, 10.0), (1.0, math.inf)])
def test_other_numbers_are_refused(stall: float, mtbf: float) -> None:
    for refused in (young_interval, daly_interval):
        with pytest.raises(ValueError, match="mean time between failures"):
            refused(stall, mtbf)
    with pytest.raises(ValueError, match="mean time between failures"):
        expected_goodput(10.0, stall, 0.0, mtbf)


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a positive number of seconds, got 0"):
        expected_goodput(0.0, 1.0, 1.0, 10.0)
