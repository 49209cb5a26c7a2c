from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balance.base import Decision, Equal, Fixed
from evener.balance.registry import BALANCERS
from evener.errors import ShareError
from evener.testing import check_balancer


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any), st.integers(0, 2000))
def test_fixed_shares_are_within_one_sample_of_their_part(weights: list[int], batch_size: int) -> None:
    shares = Fixed(weights).shares(0, batch_size)
    assert sum(shares) == batch_size
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - batch_size * weight / sum(weights)) < 1
        assert weight or share == 0


def test_fixed_shares_by_hand() -> None:
    assert Fixed([0.5, 0.3, 0.2]).shares(0, 10) == [5, 3, 2]
    assert Fixed([0.9, 0.1]).shares(0, 8) == [7, 1]
    assert Fixed([3, 1], max_shares=[20, None]).shares(0, 32) == [20, 12]
    assert Fixed([3, 1], share_multiple_of=8).shares(0, 64) == [48, 16]


def test_equal_shares() -> None:
    assert Equal(3).shares(0, 8) == [3, 3, 2]
    assert Equal(3).shares(7, 2) == [1, 1, 0]
    assert Equal(4, max_shares=[1, None, None, None]).shares(0, 8) == [1, 3, 2, 2]


def test_a_rank_of_weight_0_takes_nothing_even_where_the_others_are_full() -> None:
    with pytest.raises(ShareError, match="add up to 4"):
        Fixed([1, 0], max_shares=[4, None]).shares(0, 8)


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("name", [*BALANCERS, "weights"])
def test_every_balancer_keeps_its_promises(name: str, world_size: int) -> None:
    weights = ",".join(str(rank + 1) for rank in range(world_size))
    check_balancer(weights if name == "weights" else name, world_size)


def test_the_shares_of_many_ranks() -> None:
    check_balancer("auto", 16, batch_sizes=(7, 64, 97), steps=60)


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, -1.0], [float("nan"), 1.0]])
def test_weights_that_cannot_be(weights: list[float]) -> None:
    with pytest.raises(ShareError):
        Fixed(weights)


def test_the_wrong_number_of_max_shares() -> None:
    with pytest.raises(ShareError, match="1 max_shares"):
        Equal(2, max_shares=[3])


def test_a_decision_in_words_counts_steps_from_one_as_progress_does() -> None:
    decision = Decision(7, 10, (32, 32), (48, 16), 0.02, 0.01, "ranks differ in speed")
    assert decision.words == "step 8: shares 32/32 become 48/16 from step 11: ranks differ in speed"


def test_many_shares_are_told_in_few_words() -> None:
    old, new = (4,) * 66, (1, 9, *[4] * 63, 2)
    words = Decision(14, 17, old, new, 1.0, 0.9, "ranks differ in speed").words
    assert words == (
        "step 15: shares 4 to 4 (66 of them) become 1 to 9 (66 of them) from step 18: ranks differ in speed"
    )
    assert Decision(0, 3, (8, 8), (10, 6), 1.0, 0.9, "why").words.startswith(
        "step 1: shares 8/8 become 10/6 from"
    )
