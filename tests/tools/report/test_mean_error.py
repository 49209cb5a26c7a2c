from __future__ import annotations

import math

import numpy as np
import pytest

from evener.tools.report.columns import Numbers
from evener.tools.report.mean_error import MeanOfSteps, mean_of, reach_of, student_t


def many(series: int, number: int, correlation: float, seed: int) -> Numbers:
    """Series of numbers of variance 1 around 0 as rows, each number correlated with the one before."""
    draws = np.random.default_rng(seed).normal(size=(series, number))
    for at in range(1, number):
        draws[:, at] = correlation * draws[:, at - 1] + math.sqrt(1 - correlation**2) * draws[:, at]
    return draws


def relative(mean: MeanOfSteps) -> tuple[float, float]:
    return (mean.variance**0.5 / mean.mean) ** 2, mean.freedom


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("number", [120, 250, 480])
def test_the_interval_holds_no_change_for_95_percent_of_runs_that_differ_by_chance(
    number: int, correlation: float
) -> None:
    """Of 1000 pairs, 92 to 98 % are inside; chance alone makes 1.4 % in two standard deviations."""
    series = 0.1 * (1 + 0.05 * many(2000, number, correlation, seed=number))
    means = [mean_of(each) for each in series]
    inside = sum(
        abs(math.log(new.mean / old.mean)) < reach_of(*map(relative, (old, new)))
        for old, new in zip(means[::2], means[1::2], strict=True)
    )
    assert 920 <= inside <= 980


def test_slow_spells_that_hide_in_noise_widen_the_interval() -> None:
    """Steps alone are hardly correlated with the one before, and yet their means are."""
    spells = many(600, 480, 0.9, seed=1) * math.sqrt(0.3) + many(600, 480, 0.0, seed=2) * math.sqrt(0.7)
    means = [mean_of(1 + 0.05 * each) for each in spells]
    inside = sum(
        abs(new.mean - old.mean) < reach_of(*((each.variance, each.freedom) for each in (old, new)))
        for old, new in zip(means[::2], means[1::2], strict=True)
    )
    assert inside >= 0.92 * 300


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423), (1e9, 1.96)]
)
def test_the_quantile_of_student(freedom: float, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, rel=2e-3)
