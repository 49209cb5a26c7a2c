from __future__ import annotations

import json
import random

import pytest

from evener.balance.policy import Policy
from evener.balance.trial import DivisionComparison

OLD, NEW = (8, 8), (12, 4)


def compared(
    old: float, new: float, steps: int, noise: float = 0.0, seed: int = 0, gain: float = 0.05
) -> DivisionComparison:
    comparison, source = DivisionComparison(0, 16, OLD, NEW, gain, 0.02), random.Random(seed)
    for _ in range(steps):
        comparison.add(OLD, old * source.lognormvariate(0, noise))
        comparison.add(NEW, new * source.lognormvariate(0, noise))
    return comparison


def test_the_gain_is_that_of_the_slowest_rank_and_known_the_better_the_more_steps() -> None:
    gain, error = compared(1.0, 0.9, 24, 0.05).measured()
    assert gain == pytest.approx(0.105, abs=2 * error)
    assert error < 0.6 * compared(1.0, 0.9, 6, 0.05).measured()[1]


def test_one_slow_step_decides_nothing() -> None:
    comparison = compared(1.0, 1.0, 12)
    comparison.add(NEW, 5.0)
    assert comparison.measured()[0] == pytest.approx(0.0)


def test_steps_with_other_shares_and_without_a_time_are_left_out() -> None:
    comparison = compared(1.0, 1.0, 3)
    for sizes, seconds in (((9, 7), 1.0), (OLD, float("nan")), (NEW, 0.0), ((6, 2), 1.0)):
        comparison.add(sizes, seconds)
    assert (len(comparison.of_old), len(comparison.of_new)) == (3, 3)


def test_prediction_and_measurement_count_each_by_its_error() -> None:
    comparison = compared(1.0, 0.9, 24, 0.01)
    assert comparison.together(0.02)[0] == pytest.approx(0.105, abs=0.02)
    comparison.error = 1e-6
    assert comparison.together(1e-6)[0] == pytest.approx(0.0513, abs=0.01)


@pytest.mark.parametrize(
    ("new", "steps", "verdict"), [(0.9, 3, None), (0.93, 8, True), (1.12, 4, False), (1.2, 24, False)]
)
def test_the_verdict(new: float, steps: int, verdict: bool | None) -> None:
    assert compared(1.0, new, steps, 0.01).verdict(Policy()) is verdict


def test_what_brings_nothing_seldom_stays_and_what_brings_much_seldom_goes() -> None:
    for new, least, most in ((1.0, 0, 13), (0.9, 36, 40)):
        stays = 0
        for seed in range(40):
            verdicts = [compared(1.0, new, n, 0.06, seed, 0.02).verdict(Policy()) for n in range(4, 25)]
            stays += next(verdict for verdict in verdicts if verdict is not None)
        assert least <= stays <= most


def test_in_doubt_to_the_end_it_does_not_stay() -> None:
    assert compared(1.0, 1.0, 24, 0.3, gain=0.01).verdict(Policy()) is False


def test_the_words() -> None:
    comparison = compared(1.0, 0.97, 4)
    assert comparison.description == "in a trial, steps were 3.0% shorter (4 of each, predicted 5.0% shorter)"
    comparison = compared(1.03, 1.0, 4)
    comparison.promised = 0.05
    assert comparison.description == "steps were 3.0% longer, not 5.0% shorter"


def test_a_comparison_comes_back_from_json() -> None:
    comparison = compared(1.0, 0.9, 3)
    assert DivisionComparison.from_values(json.loads(json.dumps(comparison.values()))) == comparison
