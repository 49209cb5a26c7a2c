"""The time of a step follows from costs: shares, speeds, passes and what hides."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balance.time_model import Line
from evener.tools.plan.costs import LEAST_SPREAD, QUANTILES, StepCosts, part_of, step_time

LINE = Line(0.002, 0.001)
positive = st.floats(1e-5, 1e-2)
lines = st.builds(Line, positive, positive)


def costs(*compute: Line, parts: int | None = None, **others: object) -> StepCosts:
    return StepCosts(compute, len(compute) if parts is None else parts, **others)  # type: ignore[arg-type]


@given(st.lists(lines, min_size=2, max_size=3), st.integers(1, 12))
def test_balanced_shares_are_the_best_of_all_divisions(compute: list[Line], size: int) -> None:
    took = step_time(costs(*compute), size, balanced=True)
    own = max(line(share) for line, share in zip(compute, took.shares, strict=True))
    best = min(
        max(line(share) for line, share in zip(compute, shares, strict=True))
        for shares in itertools.product(range(size + 1), repeat=len(compute))
        if sum(shares) == size
    )
    assert own == pytest.approx(best)


def test_shares_are_equal_or_as_they_are_weighted() -> None:
    assert step_time(costs(LINE, LINE), 9).shares == (5, 4)
    assert step_time(costs(LINE, LINE), 9, weights=(2, 1)).shares == (6, 3)


def test_shares_have_the_limits_of_the_settings() -> None:
    assert step_time(costs(LINE, LINE), 9, max_shares=(2, None)).shares == (2, 7)
    assert step_time(costs(LINE, LINE), 9, share_multiple_of=4).shares == (5, 4)
    assert step_time(costs(LINE, LINE), 10, weights=(4, 1), share_multiple_of=5).shares == (10, 0)
    assert step_time(costs(LINE, LINE), 9, speeds=(2, 1), balanced=True, max_shares=(None, 1)).shares == (
        8,
        1,
    )


def test_half_the_speed_takes_twice_the_time() -> None:
    took = step_time(costs(LINE, LINE), 8, speeds=(1.0, 0.5))
    assert took.compute + took.waiting == pytest.approx(2 * LINE(4))
    assert took.waiting == pytest.approx(LINE(4) / 2)


def test_balanced_shares_make_up_for_a_slow_rank() -> None:
    equal, balanced = (
        step_time(costs(LINE, LINE), 300, speeds=(1.0, 0.5), balanced=balanced) for balanced in (False, True)
    )
    assert balanced.shares[0] == pytest.approx(2 * balanced.shares[1], abs=3)
    assert balanced.seconds < 0.7 * equal.seconds


@given(st.integers(1, 6), lines)
def test_each_pass_costs_the_fixed_part_again(passes: int, line: Line) -> None:
    once, often = step_time(costs(line), 32), step_time(costs(line), 32, passes=passes)
    assert often.compute - once.compute == pytest.approx((passes - 1) * line.overhead_seconds, abs=1e-12)


def test_the_bubble_is_smaller_with_more_passes() -> None:
    pipeline = costs(Line(0.0, 0.001), Line(0.0, 0.001), parts=1, bubble=1.0)
    assert step_time(pipeline, 8).bubble == pytest.approx(0.008)
    assert step_time(pipeline, 8, passes=4).bubble == pytest.approx(0.002)


@given(rest=lines, hidden=st.floats(0, 1), exposed=positive, size=st.integers(1, 100))
def test_communication_hides_behind_passes_but_for_what_is_exposed(
    rest: Line, hidden: float, exposed: float, size: int
) -> None:
    given_ = costs(LINE, LINE, rest=rest, hidden=hidden, exposed=exposed)
    took = step_time(given_, size)
    assert took.communication >= exposed
    whole = step_time(costs(LINE, LINE, rest=rest, exposed=exposed), size)
    assert took.communication <= whole.communication
    assert whole.communication == pytest.approx(max(exposed, rest(size)))


def test_communication_within_passes_does_not_hide() -> None:
    within = costs(LINE, blocking=Line(0.003, 0.0), rest=Line(0.001, 0.0), hidden=1.0)
    assert step_time(within, 4).communication == pytest.approx(0.003)


@given(st.lists(lines, min_size=1, max_size=4), st.integers(1, 64), positive, st.floats(0.0, 2.0))
def test_terms_add_up_to_the_seconds(compute: list[Line], size: int, update: float, bubble: float) -> None:
    took = step_time(costs(*compute, rest=LINE, update=update, bubble=bubble, input=LINE), size)
    assert took.seconds == pytest.approx(math.fsum(took.terms.values()))
    assert min(took.terms.values()) >= 0
    slowest = max(
        line(share) or line.overhead_seconds for line, share in zip(compute, took.shares, strict=True)
    )
    assert took.compute + took.waiting == pytest.approx(slowest)
    name, part = took.largest()
    assert part * took.seconds == pytest.approx(max(v for k, v in took.terms.items() if k != "compute"))
    assert took.terms[name] == pytest.approx(part * took.seconds)


def test_a_rank_without_samples_still_takes_a_pass() -> None:
    assert step_time(costs(LINE, LINE), 4, weights=(1, 0), speeds=(1.0, 0.1)).waiting > 0


def test_ranks_of_a_team_have_one_share() -> None:
    """The share is as large as suits the slower rank of the team."""
    slow, fast = Line(0.0, 0.003), Line(0.0, 0.001)
    took = step_time(costs(fast, slow, fast, fast, parts=2), 40, balanced=True)
    assert took.shares == (10, 30)
    assert took.compute + took.waiting == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("parts", "ranks", "expected"),
    [(1, 3, [0, 0, 0]), (2, 4, [0, 0, 1, 1]), (4, 4, [0, 1, 2, 3]), (2, 6, [0, 0, 0, 1, 1, 1])],
)
def test_the_part_of_a_rank(parts: int, ranks: int, expected: list[int]) -> None:
    assert [part_of(rank, parts, ranks) for rank in range(ranks)] == expected


@given(st.integers(1, 10_000), st.floats(0.0, 0.5))
def test_quantiles_are_in_order_around_the_median(size: int, spread: float) -> None:
    took = step_time(costs(LINE, spread=spread, sizes=(16, 64)), size)
    found = [took.quantile(part) for part in QUANTILES]
    assert found == sorted(set(found))
    assert took.quantile(0.5) == pytest.approx(took.seconds)
    assert took.quantile(0.05) * took.quantile(0.95) == pytest.approx(took.seconds**2)


def test_the_spread_grows_away_from_what_was_tried() -> None:
    tried = costs(LINE, spread=0.0, sizes=(16, 64))
    near, between, above, far = (step_time(tried, size).spread for size in (64, 32, 128, 512))
    assert near == LEAST_SPREAD
    assert near < between == above < far


def test_what_was_not_tried_has_its_own_spread_at_any_size() -> None:
    untried = costs(LINE, spread=0.3)
    assert not untried.is_measured
    assert {step_time(untried, size).spread for size in (1, 64, 4096)} == {0.3}


def test_a_pipeline_has_no_more_micro_batches_than_samples() -> None:
    cut = costs(LINE, LINE, parts=1, pieces=4, piece=0.003)
    for size, count in ((1, 1), (3, 3), (4, 4), (64, 4)):
        took = step_time(cut, size)
        assert took.compute == pytest.approx(count * LINE.overhead_seconds + size * LINE.seconds_per_sample)
        assert took.communication == pytest.approx(0.003 * count)
    assert step_time(cut, 64, passes=8).compute == pytest.approx(8 * LINE.overhead_seconds + 0.064)
