from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.data.division import by_weights, check_shares, divide, own_slice
from evener.errors import ShareError

shares_lists = st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any)


def test_the_table_of_the_module_docstring() -> None:
    table = divide(10, [5, 3, 2], 4)
    assert [[list(part) for part in row] for row in table] == [
        [[0, 1], [2], [3]],
        [[4, 5], [6, 7], []],
        [[8], [], [9]],
    ]


@given(shares_lists, st.integers(1, 100))
@settings(max_examples=200, deadline=None)
def test_rows_are_micro_batches_and_columns_are_shares(shares: list[int], micro_batch: int) -> None:
    size = sum(shares)
    table = divide(size, shares, micro_batch)
    assert [position for row in table for part in row for position in part] == list(range(size))
    assert [sum(map(len, row)) for row in table[:-1]] == [min(micro_batch, size)] * (len(table) - 1)
    assert 0 < sum(map(len, table[-1])) <= micro_batch
    assert [sum(len(row[rank]) for row in table) for rank in range(len(shares))] == shares


@given(shares_lists, st.integers(1, 100))
@settings(max_examples=200, deadline=None)
def test_every_rank_keeps_to_its_proportion(shares: list[int], micro_batch: int) -> None:
    size = sum(shares)
    done = [0] * len(shares)
    for row in divide(size, shares, micro_batch):
        done = [before + len(part) for before, part in zip(done, row, strict=True)]
        for rank, share in enumerate(shares):
            due = share * sum(done) / size
            assert math.floor(due) <= done[rank] <= math.ceil(due)


def test_a_batch_without_micro_batches_is_one_row() -> None:
    assert divide(5, [2, 0, 3]) == ((range(0, 2), range(2, 2), range(2, 5)),)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([2, 2], "add up to 4, not to the 5"),
        ([6, -1], "negative -1 on rank 1"),
        ([2.5, 2.5], "not all integers"),
    ],
)
def test_shares_that_cannot_divide_are_refused(shares: list[int], message: str) -> None:
    with pytest.raises(ShareError, match=message):
        divide(5, shares, 2)


def test_the_wrong_number_of_shares_is_refused() -> None:
    with pytest.raises(ShareError, match="are 2 for 3 ranks"):
        check_shares([2, 3], 5, 3)


def test_an_empty_micro_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample, not 0"):
        divide(5, [5], 0)


@given(
    st.integers(0, 10_000),
    st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=12).filter(any),
)
def test_weights_become_integers_that_add_up(size: int, weights: list[float]) -> None:
    shares = by_weights(size, weights)
    assert sum(shares) == size
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - size * weight / sum(weights)) < 1 + 1e-6


def test_weights_round_by_largest_remainder_and_ties_go_to_lower_ranks() -> None:
    assert by_weights(97, [0.5, 0.3, 0.2]) == [49, 29, 19]
    assert by_weights(10, [1, 1, 1, 1]) == [3, 3, 2, 2]
    assert by_weights(2, [1, 1, 1]) == [1, 1, 0]
    assert by_weights(10, [0, 1]) == [0, 10]


@pytest.mark.parametrize("weights", [[0, 0], [1, -1], [float("nan"), 1], [float("inf"), 1], []])
def test_weights_without_a_proportion_are_refused(weights: list[float]) -> None:
    with pytest.raises(ShareError, match="cannot divide a batch"):
        by_weights(10, weights)


def test_the_slices_of_the_ranks_follow_each_other_and_may_be_empty() -> None:
    assert [list(range(9))[own_slice([4, 0, 5], rank)] for rank in range(3)] == [
        [0, 1, 2, 3],
        [],
        [4, 5, 6, 7, 8],
    ]
