"""Costs are fitted to trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.tools.plan.candidates import Candidate
from evener.tools.plan.costs import step_time
from evener.tools.plan.measured import (
    OF_ALL,
    costs_of,
    line_through,
    most_pieces,
    nonnegative_fit,
    off_line,
    repeat_spread,
    spread_of,
    unclear,
    undisturbed,
)
from evener.tools.plan.trial import DISTURBED, Trial

numbers = st.floats(0.0, 1.0)
sizes = st.lists(st.integers(1, 1000), min_size=2, max_size=5, unique=True)


def trial(
    batch_size: int, seconds: float, compute: tuple[float, ...], waits: float = 0.0, parts: int | None = None
) -> Trial:
    ranks, parts = len(compute), parts or len(compute)
    shares = (batch_size // parts,) * parts
    return Trial(Candidate(ranks, "ddp"), batch_size, shares, (seconds,) * 9, compute, (waits,) * ranks, 0.1)


@given(numbers, numbers, sizes)
def test_a_line_is_exact_through_points_of_a_line(fixed: float, each: float, at: list[int]) -> None:
    line = line_through([(x, fixed + each * x) for x in at])
    for x in at:
        assert line(x) == pytest.approx(fixed + each * x, abs=1e-9)


@given(st.lists(st.tuples(st.integers(0, 100), numbers), max_size=6))
def test_a_line_has_no_negative_numbers(points: list[tuple[int, float]]) -> None:
    line = line_through(points)
    assert line.overhead_seconds >= 0
    assert line.seconds_per_sample >= 0


def test_through_one_point_it_is_in_proportion() -> None:
    line = line_through([(10, 0.5)])
    assert (line(10), line(20)) == (0.5, 1.0)


def test_what_the_first_step_needs_is_kept() -> None:
    assert costs_of([trial(8, 1.0, (0.9,)), trial(16, 2.0, (1.9,))], 0.0).setup == 0.1


def test_repeats_at_a_size_count_by_their_mean() -> None:
    line = line_through([(10, 1.0), (10, 3.0), (30, 4.0)])
    assert [line(10), line(30)] == pytest.approx([2.0, 4.0])


@given(st.sampled_from([1, 2, 3]), numbers, numbers)
def test_steps_that_were_tried_are_predicted_exactly(ranks: int, fixed: float, rest: float) -> None:
    def took(size: int) -> Trial:
        own = fixed + 0.01 * size / ranks
        return trial(size, own + rest + 0.02, (own,) * ranks, 0.02)

    costs = costs_of([took(12), took(48)], 0.1)
    assert costs.sizes == (12, 48)
    for size in (12, 24, 48, 96):
        assert step_time(costs, size).seconds == pytest.approx(took(size).seconds)


def test_terms_add_up_to_the_step_whichever_rank_was_slow() -> None:
    """Ranks take turns in being slow, so no rank's line is that of the slowest."""
    tried = [trial(8, 1.5, (0.8, 1.0)), trial(8, 1.5, (1.0, 0.8)), trial(24, 2.5, (1.6, 1.8))]
    found = step_time(costs_of(tried, 0.0), 8)
    assert found.compute + found.waiting < 1.0
    assert found.seconds == pytest.approx(1.5)
    assert step_time(costs_of(tried, 0.0), 24).seconds == pytest.approx(2.5)


def test_what_comes_after_the_passes_may_become_less_with_the_batch() -> None:
    """Messages hide behind passes: nothing of them is left at the larger size."""
    costs = costs_of([trial(8, 1.0, (0.8,)), trial(32, 3.3, (3.2,))], 0.0)
    assert [step_time(costs, size).communication for size in (8, 32, 80)] == pytest.approx([0.2, 0.1, 0.0])
    for size, seconds in ((8, 1.0), (20, 2.15), (32, 3.3)):
        assert step_time(costs, size).seconds == pytest.approx(seconds)


@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(0.1, 1.0), st.floats(0.0, 0.5)), min_size=1, max_size=6)
)
def test_a_step_is_that_of_the_line_of_whole_steps_or_of_passes_alone(
    rows: list[tuple[int, float, float]],
) -> None:
    tried = [trial(size, own + more, (own,)) for size, own, more in rows]
    calm = undisturbed(tried)
    line = line_through([(t.batch_size, t.seconds) for t in calm], [t.seconds**-2 for t in calm])
    found = costs_of(tried, 0.0)
    for size in {each.batch_size for each in tried}:
        passes = found.compute[0](size)
        assert step_time(found, size).seconds == pytest.approx(max(passes, line(size)))


def test_after_one_size_only_the_passes_grow_with_the_batch() -> None:
    costs = costs_of([trial(8, 1.0, (0.6,))], 0.0)
    assert [step_time(costs, size).seconds for size in (8, 16)] == pytest.approx([1.0, 1.6])


def staged(batch_size: int, parts: int, fixed: float, piece: float, sample: float) -> Trial:
    """A step of a pipeline of two stages, which cuts a share into at most four micro-batches."""
    share = batch_size // parts
    count = min(4, share)
    own = tuple(stage * (piece * count + sample * share) for stage in (0.3, 0.5)) * parts
    seconds = fixed + piece * count + sample * share
    return replace(trial(batch_size, seconds, own, parts=parts), pieces=count)


@given(st.sampled_from([1, 2]), numbers, st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_each_micro_batch_of_a_pipeline_costs_what_it_costs(
    parts: int, fixed: float, piece: float, sample: float
) -> None:
    """Small batches have fewer of them: from 2 samples to 4 a step grows faster than from 4 to 8."""
    costs = costs_of([staged(parts * n, parts, fixed, piece, sample) for n in (2, 8, 16, 8)], 0.0)
    assert costs.pieces == 4
    assert off_line([staged(parts * n, parts, fixed, piece, sample) for n in (2, 8, 16)]) == pytest.approx(
        [0.0] * 3, abs=1e-6
    )
    for n in (1, 2, 3, 4, 6, 8, 12, 24):
        found, true = step_time(costs, parts * n), staged(parts * n, parts, fixed, piece, sample)
        assert found.seconds == pytest.approx(true.seconds, rel=1e-4)
        assert found.compute + found.waiting == pytest.approx(max(true.compute), rel=1e-4)


def test_a_pipeline_that_cuts_nothing_or_always_into_samples_takes_a_line() -> None:
    whole = [trial(size, 1.0 + size, (1.0,)) for size in (2, 8, 16)]
    single = [replace(each, pieces=each.batch_size) for each in whole]
    assert most_pieces(whole) == most_pieces(single) == 1
    assert costs_of(single, 0.0) == costs_of(whole, 0.0)


def test_with_two_sizes_a_pipeline_still_has_fewer_micro_batches_at_smaller_ones() -> None:
    """Both had 4 micro-batches, and 2 of them are not as long as 4."""
    costs = costs_of([staged(n, 1, 0.0, 1.0, 0.1) for n in (8, 16)], 0.0)
    assert step_time(costs, 12).seconds == pytest.approx(4 + 1.2)
    assert 2 + 0.2 <= step_time(costs, 2).seconds < 0.8 * step_time(costs, 4).seconds


@given(st.lists(st.floats(-1.0, 1.0), min_size=3, max_size=3))
def test_no_factor_is_negative_and_no_other_fit_of_some_terms_is_better(factors: list[float]) -> None:
    terms = [(2, 2, 1), (4, 8, 1), (4, 16, 1), (4, 24, 1)]
    values = [2.0 + sum(x * y for x, y in zip(row, factors, strict=True)) for row in terms]

    def error(found: Sequence[float]) -> float:
        rows = zip(terms, values, strict=True)
        return sum((sum(x * y for x, y in zip(row, found, strict=True)) - value) ** 2 for row, value in rows)

    best = nonnegative_fit(terms, values, [1.0] * 4)
    assert min(best) >= 0
    for at in range(3):  # no step along an axis that keeps it non-negative is better
        for more in (-1e-3, 1e-3):
            moved = [*best[:at], max(0.0, best[at] + more), *best[at + 1 :]]
            assert error(moved) >= error(best) - 1e-7


def test_ranks_that_share_samples_are_fitted_by_their_part() -> None:
    tried = [trial(size, 0.1 * size, (0.05 * size, 0.1 * size), parts=1) for size in (4, 16)]
    costs = costs_of(tried, 0.0)
    assert costs.parts == 1
    assert [line.seconds_per_sample for line in costs.compute] == pytest.approx([0.05, 0.1])


def test_what_repeats_differ_by_is_the_spread() -> None:
    calm = costs_of([trial(8, 1.0, (0.9,)), trial(8, 1.0, (0.9,))], 0.0)
    wild = costs_of([trial(8, 1.0, (0.9,)), trial(8, 1.5, (0.9,))], 0.0)
    assert calm.spread == 0.0
    assert wild.spread == pytest.approx(math.log(1.5) / math.sqrt(OF_ALL + 1))
    assert costs_of([trial(8, 1.0, (0.9,))], 0.2).spread == pytest.approx(0.2)


def test_the_spread_of_all_is_that_of_trials_that_were_the_same() -> None:
    alike = [trial(8, 1.0, (0.9,)), trial(8, 1.2, (0.9,)), trial(16, 5.0, (0.9,))]
    other = [trial(8, 1.0, (0.9,)), trial(16, 2.0, (0.9,))]
    assert spread_of([alike, other]) == pytest.approx(math.log(1.2))
    assert spread_of([alike, alike[1::-1] * 2]) == pytest.approx(math.log(1.2))
    assert spread_of([other]) == 0.0


def test_the_difference_of_two_trials_has_no_direction() -> None:
    one, other = trial(8, 1.0, (0.9,)), trial(8, 1.1, (0.9,))
    assert repeat_spread(one, other) == pytest.approx(math.log(1.1))
    assert repeat_spread(other, one) == pytest.approx(math.log(1.1))


def test_disturbed_trials_do_not_count_and_make_a_prediction_less_certain() -> None:
    quiet = [trial(12, 1.0, (0.9,)), trial(48, 4.0, (3.9,)), trial(12, 1.05, (0.95,)), trial(48, 4.0, (3.9,))]
    disturbed = [*quiet[:3], trial(48, 7.0, (6.9,))]
    assert undisturbed(quiet) == quiet
    assert undisturbed(disturbed) == quiet[:3]
    assert costs_of(disturbed, 0.0).compute == costs_of(quiet[:3], 0.0).compute
    assert costs_of(disturbed, 0.0).spread > costs_of(quiet, 0.0).spread


def test_a_start_that_was_slower_counts_as_much_as_one_that_was_faster() -> None:
    """A run is another start. Within one, only the fastest trials count."""
    fast = [trial(size, size * 0.1, (size * 0.1,)) for size in (8, 8, 32)]
    slow = [replace(trial(size, size * 0.13, (size * 0.13,)), start=1) for size in (8, 8, 32)]
    disturbed = replace(trial(8, 2.0, (2.0,)), start=1)
    assert undisturbed([*fast, *slow, disturbed]) == [*fast, *slow]
    busy = [replace(each, steps=tuple(2 * step for step in each.steps)) for each in slow]
    assert undisturbed([*fast, *busy]) == fast
    found = costs_of([*fast, *slow, disturbed], 0.0)
    assert 0.1 * 16 < step_time(found, 16).seconds < 0.13 * 16
    assert found.spread > costs_of(fast, 0.0).spread


@given(st.lists(st.floats(0.9, 1.3), min_size=1, max_size=4))
def test_what_took_different_times_is_unclear(times: list[float]) -> None:
    found = unclear([trial(12, each, (each,)) for each in times])
    one = (Candidate(1, "ddp"), 12)
    if max(times) > (1 + DISTURBED) * min(times):
        assert found == [one]
    elif max(times) < (1 + DISTURBED / 2) * min(times):
        assert not found


def test_a_size_off_the_line_of_the_others_is_unclear() -> None:
    calm = [trial(size, 1.0 + 0.1 * size, (1.0,)) for size in (4, 16, 16, 32)]
    assert not unclear(calm)
    assert off_line(calm) == pytest.approx([0.0] * 4)
    assert (Candidate(1, "ddp"), 32) in unclear([*calm[:3], trial(32, 7.0, (1.0,))])


def test_a_curve_makes_a_prediction_less_certain() -> None:
    line = costs_of([trial(size, 0.1 * size, (0.1 * size,)) for size in (4, 16, 32)], 0.0)
    curve = costs_of([trial(size, size**0.7, (size**0.7,)) for size in (4, 16, 32)], 0.0)
    assert line.spread == pytest.approx(0.0)
    assert 0.01 < curve.spread < 0.2


def test_errors_count_in_parts_of_a_step() -> None:
    """A line through a curve is off by about as many per cent at each end."""
    points = [(4.0, 3.0), (16.0, 8.0), (64.0, 40.0)]
    line = line_through(points, [y**-2 for _, y in points])
    small, *_, large = (abs(line(x) / y - 1) for x, y in points)
    assert small < 0.25
    assert large < 0.25
