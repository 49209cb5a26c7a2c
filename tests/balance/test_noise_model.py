from __future__ import annotations

import random
from itertools import islice

import pytest

from evener.balance.noise_model import USUAL_MEMORY, common, memory
from tests.balance.weather import wandering


@pytest.mark.parametrize(("correlation", "worth"), [(0.0, (1.0, 1.5)), (0.33, (1.5, 2.5)), (0.8, (3.5, 8.0))])
def test_noise_that_lasts_makes_observations_count_less(
    correlation: float, worth: tuple[float, float]
) -> None:
    found = sorted(
        memory(list(islice(wandering(random.Random(seed), 1.0, correlation), 192))) for seed in range(40)
    )
    assert worth[0] < found[20] < worth[1]


def test_few_values_tell_nothing_of_it() -> None:
    assert memory([0.0, 1.0] * 8) == USUAL_MEMORY
    assert memory([0.0] * 100) < USUAL_MEMORY


def test_what_all_ranks_have_in_common_is_their_median() -> None:
    assert common([0.3, 0.3, 0.3], 0.0) == 0.3
    assert common([0.0, 0.7, 0.1], 0.0) == 0.1


def test_of_two_ranks_the_one_that_stayed_is_the_measure() -> None:
    assert common([0.0, 0.7], 0.0) == 0.0
    assert common([0.7, 0.02], 0.0) == 0.02
    assert common([0.3, 0.4], 0.0) == 0.3
    assert common([-0.1, 0.1], 0.05) == 0.05
