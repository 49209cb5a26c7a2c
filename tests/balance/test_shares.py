from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balance import shares as module
from evener.balance.shares import parse_max_shares, parse_shares, solve, validate_shares
from evener.errors import ShareError


def divisions(total: int, max_shares: list[int]) -> Iterator[list[int]]:
    if not max_shares:
        if total == 0:
            yield []
        return
    for first in range(min(total, max_shares[0]) + 1):
        for others in divisions(total - first, max_shares[1:]):
            yield [first, *others]


def allowed(shares: list[int], batch_size: int, share_multiple_of: int) -> bool:
    """Multiples of share_multiple_of, but for one rank that holds the batch's remainder in addition."""
    beyond = sorted(share % share_multiple_of for share in shares)
    return not any(beyond[:-1]) and beyond[-1] == batch_size % share_multiple_of


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[float]], int, list[int | None], int]:
    ranks, batch_size = draw(st.integers(1, 4)), draw(st.integers(0, 14))
    steps = st.lists(st.integers(0, 4), min_size=batch_size, max_size=batch_size)
    curves = []
    for _ in range(ranks):
        seconds = [0.0]
        for step in draw(steps):
            seconds.append(seconds[-1] + step)
        curves.append(seconds)
    max_shares = draw(st.lists(st.none() | st.integers(0, 14), min_size=ranks, max_size=ranks))
    return curves, batch_size, max_shares, draw(st.integers(1, 5))


@given(problems(), st.booleans())
def test_no_division_ends_sooner(
    problem: tuple[list[list[float]], int, list[int | None], int], head_start: bool
) -> None:
    curves, batch_size, max_shares, share_multiple_of = problem
    times = [curve.__getitem__ for curve in curves]
    limits = [batch_size if cap is None else cap for cap in max_shares]
    ends = [
        max(time(n) for time, n in zip(times, shares, strict=True))
        for shares in divisions(batch_size, limits)
        if allowed(shares, batch_size, share_multiple_of)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "HEAD_START", 0 if head_start else 10**9)
        if not ends:
            with pytest.raises(ShareError):
                solve(times, batch_size, max_shares, share_multiple_of)
            return
        shares = solve(times, batch_size, max_shares, share_multiple_of)
    validate_shares(shares, batch_size, len(curves), max_shares)
    assert allowed(shares, batch_size, share_multiple_of)
    assert max(time(n) for time, n in zip(times, shares, strict=True)) == min(ends)


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0.01, 3)), min_size=1, max_size=8),
    st.integers(600, 6000),
    st.integers(1, 9),
)
def test_a_head_start_gives_the_same_shares_as_the_greedy(
    ranks: list[tuple[float, float]], batch_size: int, share_multiple_of: int
) -> None:
    times = [lambda n, a=a, b=b: a + b * n if n else 0.0 for a, b in ranks]
    quick = solve(times, batch_size, None, share_multiple_of)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "HEAD_START", 10**9)
        assert quick == solve(times, batch_size, None, share_multiple_of)


def test_a_large_batch_needs_few_evaluations() -> None:
    calls = 0

    def time(n: int) -> float:
        nonlocal calls
        calls += 1
        return 5.0 + 0.1 * n

    assert sum(solve([time] * 8, 1_000_000)) == 1_000_000
    assert calls < 20_000


def test_the_drawing() -> None:
    times = [lambda n: 1.0 + n if n else 0.0, lambda n: 3.0 * n]
    assert [solve(times, batch_size) for batch_size in range(1, 5)] == [[1, 0], [2, 0], [2, 1], [3, 1]]


def test_ties_go_to_the_lower_rank() -> None:
    assert solve([float] * 3, 8) == [3, 3, 2]
    assert solve([float] * 3, 26, None, 8) == [10, 8, 8]


def test_a_rank_may_get_nothing() -> None:
    assert solve([lambda n: n, lambda n: 100.0 + n if n else 0.0], 64) == [64, 0]


def test_max_shares_that_cannot_hold_the_batch_name_their_sum_and_the_batch() -> None:
    with pytest.raises(ShareError, match=r"batch has 32 samples.*\[10, 20\], add up to 30"):
        solve([float, float], 32, [10, 20])
    with pytest.raises(ShareError, match="in multiples of 8"):
        solve([float, float], 28, [15, 15], 8)


@pytest.mark.parametrize(
    ("max_shares", "share_multiple_of", "batch_size"),
    [([1], 1, 2), ([-1, 4], 1, 2), (None, 0, 2), (None, 1, -1)],
)
def test_arguments_that_cannot_be(
    max_shares: list[int | None] | None, share_multiple_of: int, batch_size: int
) -> None:
    with pytest.raises(ShareError):
        solve([float, float], batch_size, max_shares, share_multiple_of)


def test_validate_shares() -> None:
    validate_shares([3, 0, 5], 8, 3, [None, 0, 5])
    for shares, says in (
        ([3, 5], "2 shares"),
        ([4, -1, 5], "rank 1 has a share of -1"),
        ([2, 0, 6], "rank 2 has a share of 6"),
        ([3, 0, 4], "add up to 7"),
    ):
        with pytest.raises(ShareError, match=says):
            validate_shares(shares, 8, 3, [None, 0, 5])


def test_parse_shares() -> None:
    assert parse_shares("0.5,0.3,0.2", 3) == pytest.approx([0.5, 0.3, 0.2])
    assert parse_shares("3, 2,1", 3) == pytest.approx([1 / 2, 1 / 3, 1 / 6])
    assert parse_shares("1,0", 2) == [1.0, 0.0]
    assert parse_shares("1,1", 2) == [0.5, 0.5]
    assert parse_shares("2.5,1", 2) == pytest.approx([5 / 7, 2 / 7])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0.5,0.3,0.1", "add up to 0.9"),
        ("3,2", "2 weights .* for 3 ranks"),
        ("3,-2,1", "rank 1 is -2"),
        ("0,0,0", "some rank must have work"),
        ("1,nan,1", "rank 1 is nan"),
        ("inf,1,1", "rank 0 is inf"),
        ("a,b,c", "one number for each rank"),
        ("1,,2", "one number for each rank"),
        ("", "one number for each rank"),
        ("-0.5,1,0.5", "rank 0 is -0.5"),
    ],
)
def test_shares_that_cannot_be(text: str, says: str) -> None:
    with pytest.raises(ShareError, match=says):
        parse_shares(text, 3)


def test_max_shares_in_words() -> None:
    assert parse_max_shares(None, 2) is None
    assert parse_max_shares("64, -,0", 3) == [64, None, 0]
    for text, words in (
        ("64", "1 max_shares"),
        ("a,b", "- for no limit"),
        ("-3,-", "max_shares of rank 0 is -3"),
        ("", "- for no"),
    ):
        with pytest.raises(ShareError, match=words):
            parse_max_shares(text, 2)
