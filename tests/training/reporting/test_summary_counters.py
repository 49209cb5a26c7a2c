from __future__ import annotations

import math

import pytest

from evener.core.records import EvaluationRecord, StepRecord
from evener.training.reporting.summary_counters import WINDOW, SummaryCounters


def took(*seconds: float, shares: tuple[int, ...] = (4, 4)) -> StepRecord:
    return StepRecord(0, 0, 1.0, sum(shares), max(seconds, default=0.1), shares, 0.1, compute_seconds=seconds)


def test_one_pause_changes_no_rank_s_time_for_a_sample() -> None:
    tally = SummaryCounters(2)
    for number in range(40):
        tally.step(took(0.4, 25.0 if number == 7 else 0.8))
    assert tally.sample_seconds() == [0.1, 0.2]


def test_the_time_for_a_sample_is_that_of_the_last_steps_whatever_the_shares() -> None:
    tally = SummaryCounters(2)
    for _ in range(40):
        tally.step(took(9.0, 9.0))
    for _ in range(WINDOW // 2):
        tally.step(took(0.2, 1.2, shares=(2, 6)))
        tally.step(took(0.6, 0.4, shares=(6, 2)))
    assert tally.sample_seconds() == [0.1, 0.2]


def test_the_fixed_part_of_a_rank_s_time_is_told_by_shares_that_differ() -> None:
    tally = SummaryCounters(2)
    for _ in range(40):
        tally.step(took(0.1 + 0.1 * 4, 0.8))
    assert tally.share_lines() == [], "all shares were alike"
    for _ in range(20):
        tally.step(took(0.1 + 0.1 * 8, 0.8, shares=(8, 2)))
    (fixed, each), (slow, other) = tally.share_lines()
    assert (fixed, each) == (pytest.approx(0.1, abs=0.02), pytest.approx(0.1, rel=0.05))
    assert slow > 0.7
    assert other < 0.03, "it takes as long with any share"


def test_few_steps_and_ranks_that_share_samples_have_no_time_for_a_sample() -> None:
    for record, steps in ((took(0.4, 0.8), 5), (took(0.4, 0.8, 0.4, 0.8), 40), (took(), 40)):
        tally = SummaryCounters(2)
        for _ in range(steps):
            tally.step(record)
        assert tally.sample_seconds() == []
    idle = SummaryCounters(2)
    for _ in range(40):
        idle.step(took(0.4, 0.0, shares=(8, 0)))
    assert idle.sample_seconds() == []


def test_the_summary_gets_the_numbers_of_steps_and_of_the_last_evaluation() -> None:
    tally = SummaryCounters(2)
    assert tally.fractions() == [0.0, 0.0]
    assert math.isnan(tally.describe(0.0)["final_loss"])
    tally.step(took(0.4, 0.8, shares=(6, 2)))
    tally.evaluation(EvaluationRecord(1, 0, {"accuracy": 0.5}, 10, 1.0))
    told = tally.describe(2.0)
    assert tally.fractions() == [0.75, 0.25]
    assert (told["samples_in_seconds"], told["samples_per_second"]) == (8, 4.0)
    assert (told["final_loss"], told["metrics"]) == (1.0, {"accuracy": 0.5})


def test_bytes_of_merges_are_added_up() -> None:
    tally = SummaryCounters(3)
    for number in range(2):
        tally.step(StepRecord(number, 0, 1.0, 12, 1.0, (4, 4, 4), 0.1, merge_bytes=100))
    assert tally.describe(1.0)["merge_bytes"] == 200


def test_ranks_that_merges_did_not_wait_for_are_told() -> None:
    tally = SummaryCounters(3)
    tally.step(StepRecord(0, 0, 1.0, 12, 1.0, (4, 4, 4), 0.1, merge_ranks=((0, 1, 2),)))
    assert tally.describe(1.0)["late_for_merges"] == ""
    tally.step(StepRecord(1, 0, 1.0, 12, 1.0, (4, 4, 4), 0.1, merge_ranks=((0, 2), (0, 1), (0, 2))))
    expected = "of 4 merges with a quorum these came too late for: rank 1 2, rank 2 1; they merged later"
    assert tally.describe(1.0)["late_for_merges"] == expected


def test_the_ages_of_gradients_are_told_in_versions_and_in_samples() -> None:
    tally = SummaryCounters(3)
    merges = (((0, 0, 0, 4),), ((2, 0, 4, 8), (0, 1, 8, 10)), ((0, 0, 10, 12),))
    tally.step(StepRecord(0, 0, 1.0, 12, 1.0, (8, 0, 4), 0.1, merges=merges, wasted=3))
    assert tally.describe(1.0)["updates_of_server"].splitlines() == [
        "each sample in one of 3 updates; gradients 0.8 versions old on average, at most 2; "
        "3 samples computed again",
        "gradients of each rank: 3 + 0 + 1; versions old: 0 50%, 1 25%, 2-3 25%; samples old: 0 50%, 4-7 25%, 8-15 25%",
    ]
