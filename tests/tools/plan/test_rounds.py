"""Which trials are made, and how long they may take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.core.config.run_config import RunConfig
from evener.tools.plan.candidates import candidates_for
from evener.tools.plan.rounds import (
    LEAST_STEPS,
    MOST_STEPS,
    START_SECONDS,
    Round,
    rounds_of,
    seconds_of_first,
    steps_in,
)

CONFIG = RunConfig(device="cpu")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_way_is_tried_with_all_sizes_before_any_is_repeated(ranks: int) -> None:
    first, second, third = rounds_of(ranks, CONFIG, 64)
    ways = candidates_for(ranks)
    assert first[:-1] == [(way, size) for way in ways for size in (64, 128)]
    assert second == [(way, 16) for way in ways]
    assert third[:-1] == [(way, 64) for way in ways]
    assert first[-1] == third[-1] == (ways[0], 64)


def test_a_batch_with_one_sample_for_each_rank_has_no_smaller_one() -> None:
    rounds = rounds_of(4, CONFIG, 4)
    assert {size for each in rounds for _, size in each} == {4, 8}
    assert len(rounds) == 2


def todo(*numbers: int) -> list[list[Round]]:
    return [rounds_of(ranks, CONFIG, 64) for ranks in numbers]


def test_numbers_of_ranks_share_the_time_by_their_trials() -> None:
    """Ranks that share a core take longer, and the last number gets what is left but for its start."""
    one, four = (seconds_of_first(todo(*numbers), 100.0, 4) for numbers in ((1, 4), (4, 1)))
    assert one + four == pytest.approx(100 - 2 * START_SECONDS)
    assert four > 4 * one
    assert seconds_of_first(todo(4, 1), 100.0, 2) > four
    assert seconds_of_first(todo(4), 100.0, 2) == pytest.approx(100 - START_SECONDS)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.floats(-10.0, 100.0), st.integers(1, 8))
def test_no_number_of_ranks_gets_more_than_there_is(numbers: list[int], seconds: float, cores: int) -> None:
    found = seconds_of_first(todo(*numbers), seconds, cores)
    assert 0 <= found <= max(0.0, seconds)
    assert found > 0 or seconds <= 0


def test_ways_that_are_hopeless_take_no_time() -> None:
    assert seconds_of_first([*todo(1), [[], []]], 100.0, 2) == seconds_of_first(todo(1), 100.0, 2)


def test_a_trial_takes_the_steps_that_fit() -> None:
    assert steps_in(1.0, 0.1) == 10
    assert steps_in(1.0, 0.0) == MOST_STEPS
    assert steps_in(-1.0, 0.1) == steps_in(0.1, 1.0) == LEAST_STEPS
