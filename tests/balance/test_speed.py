from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balance.speed import Cusum, SpeedModel


def taught(sizes: list[int], a: float, b: float, noise: float = 0.0, seed: int = 0) -> SpeedModel:
    source, model = random.Random(seed), SpeedModel()
    for n in sizes:
        model.observe(n, (a + b * n) * source.lognormvariate(0, noise))
    return model


@pytest.mark.parametrize("a", [0.0, 0.005, 0.02])
def test_the_overhead_is_told_from_the_price_per_sample(a: float) -> None:
    model = taught([24, 40] * 6, a, 0.0002)
    line = model.fit().line
    assert line.overhead_seconds == pytest.approx(a, abs=0.0005)
    assert line.seconds_per_sample == pytest.approx(0.0002, rel=0.1)


def test_noise_is_estimated_and_averaged_out() -> None:
    model = taught([24, 40, 32] * 12, 0.005, 0.0002, noise=0.05)
    assert model.sigma == pytest.approx(0.05, rel=0.4)
    for n in (20, 32, 60):
        assert model.predict(n) == pytest.approx(0.005 + 0.0002 * n, abs=3 * model.error(n))
    assert model.error(32) < 0.02 * model.predict(32)


def test_the_noise_of_few_values_is_not_underestimated() -> None:
    found = sorted(taught([8, 16, 24, 32] * 3, 0.0, 0.001, noise=0.2, seed=seed).sigma for seed in range(200))
    with_prior = math.sqrt((8 * 0.2**2 + 6 * 0.05**2) / 14)
    assert found[100] == pytest.approx(with_prior, rel=0.15)


def test_single_slow_steps_change_nothing() -> None:
    model = taught([24, 40] * 8, 0.005, 0.0002)
    before = model.predict(64)
    assert model.observe(24, 1.0) is None
    assert model.observe(40, 1.0) is None
    assert model.predict(64) == pytest.approx(before, rel=0.01)


def test_with_one_size_the_split_is_assumed_and_said_to_be_uncertain() -> None:
    one, two = taught([32] * 20, 0.005, 0.0002), taught([32, 16] * 10, 0.005, 0.0002)
    assert one.predict(32) == pytest.approx(0.0114)
    assert one.predict(64) == pytest.approx(0.0114 * 1.8)
    assert one.error(64) == pytest.approx(0.25 * 0.0114, rel=0.1)
    assert two.error(64) < one.error(64) / 2


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.3])
def test_a_change_of_speed_is_relearned_within_few_observations(factor: float) -> None:
    source, model = random.Random(1), taught([24, 40] * 20, 0.005, 0.0002, noise=0.01)
    ratios = [
        model.observe(32, factor * (0.005 + 0.0002 * 32) * source.lognormvariate(0, 0.01)) for _ in range(6)
    ]
    found = [ratio for ratio in ratios if ratio is not None]
    assert found == [pytest.approx(factor, rel=0.05)]
    for n in (16, 32, 64):
        assert model.predict(n) == pytest.approx(factor * (0.005 + 0.0002 * n), rel=0.08)


def test_steady_noise_is_no_change() -> None:
    source, model = random.Random(2), SpeedModel()
    changes = [model.observe(32, 0.01 * source.lognormvariate(0, 0.05)) for _ in range(3000)]
    assert sum(change is not None for change in changes) <= 1


def test_a_cliff_is_never_predicted_away() -> None:
    model = SpeedModel()
    for _ in range(6):
        for n, seconds in ((16, 0.010), (32, 0.020), (33, 0.040), (48, 0.041), (64, 0.042)):
            model.observe(n, seconds)
    predictions = [model.predict(n) for n in range(1, 200)]
    assert predictions == sorted(predictions)
    assert model.predict(33) >= 0.039
    assert model.predict(0) == 0.0


@pytest.mark.parametrize(("n", "seconds"), [(0, 0.1), (8, 0.0), (8, math.nan), (8, math.inf), (8, -1.0)])
def test_what_says_nothing_is_ignored(n: int, seconds: float) -> None:
    model = SpeedModel()
    assert model.observe(n, seconds) is None
    assert not model.known
    with pytest.raises(ValueError, match="before one was observed"):
        model.predict(1)


def test_asking_changes_nothing_and_a_copy_through_json_goes_on_with_the_same_bits() -> None:
    asked, silent = SpeedModel(), SpeedModel()
    source = random.Random(3)
    for step in range(60):
        n = source.choice([24, 32, 40])
        seconds = 0.001 * n * source.lognormvariate(0, 0.1) * (1 if step < 30 else 2)
        asked.predict(n) if asked.known else None
        copy = SpeedModel()
        copy.load_state_dict(json.loads(json.dumps(asked.state_dict())))
        asked = copy
        assert asked.observe(n, seconds) == silent.observe(n, seconds)
    assert asked.fit() == silent.fit()
    assert asked.state_dict() == silent.state_dict()


observations = st.lists(
    st.tuples(st.integers(0, 300), st.floats(allow_nan=True) | st.floats(1e-6, 100.0)), max_size=60
)


@given(observations)
def test_a_prediction_never_decreases_and_is_finite_and_positive(seen: list[tuple[int, float]]) -> None:
    model = SpeedModel()
    for n, seconds in seen:
        model.observe(n, seconds)
    if model.known:
        predictions = [model.predict(n) for n in range(1, 400, 7)]
        assert predictions == sorted(predictions)
        assert 0 < predictions[0] <= predictions[-1] < math.inf


def test_cusum_needs_four_in_a_row() -> None:
    cusum = Cusum()
    assert [cusum.update(100.0) for _ in range(4)] == [0, 0, 0, 4]
    cusum = Cusum()
    assert [cusum.update(z) for z in (100.0, 100.0, 100.0, -1.0, -1.0, 0.0)] == [0] * 6


def test_a_speed_that_comes_back_is_known_again() -> None:
    source, model = random.Random(1), taught([24, 40] * 20, 0.005, 0.0002, noise=0.03)
    before = model.error(32)
    for factor in (2.0, 1.0):
        for _ in range(8):
            model.observe(32, factor * (0.005 + 0.0002 * 32) * source.lognormvariate(0, 0.03))
    assert model.error(32) < 1.2 * before
    assert model.predict(48) == pytest.approx(0.005 + 0.0002 * 48, rel=0.03)


def test_a_jump_beyond_the_sizes_that_are_known_is_no_change_of_speed() -> None:
    model = taught([24, 40] * 8, 0.005, 0.0002, noise=0.01)
    found = [model.observe(64, 2.0 * (0.005 + 0.0002 * 64)) for _ in range(8)]
    assert found == [None] * 8
    assert model.predict(64) == pytest.approx(2.0 * (0.005 + 0.0002 * 64), rel=0.1)
    assert model.predict(24) == pytest.approx(0.005 + 0.0002 * 24, rel=0.15)


def test_patience_asks_for_more() -> None:
    needed = []
    for patience in (1.0, 2.0):
        model = taught([32] * 30, 0.005, 0.0002, noise=0.01)
        seen = [model.observe(32, 0.0228, patience) is not None for _ in range(20)]
        needed.append(seen.index(True) + 1)
    assert needed == [4, 8]


def test_a_small_jump_is_a_better_estimate_and_no_change_of_speed() -> None:
    model = taught([32] * 30, 0.005, 0.0002, noise=0.005)
    assert [model.observe(32, 1.1 * 0.0114) for _ in range(30)] == [None] * 30
    assert model.predict(32) == pytest.approx(1.1 * 0.0114, rel=0.03)
