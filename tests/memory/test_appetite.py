"""The largest pass is found from below."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from evener.memory.appetite import SPARE, Appetite


def sizes_until_settled(fixed: int, slope: int, room: int) -> list[int]:
    """Those of passes of which each is as large as it may be."""
    appetite, sizes = Appetite(), list[int]()
    while sizes.count(appetite.most(room)) < 2:
        sizes.append(appetite.most(room))
        appetite.learn(sizes[-1], fixed + slope * sizes[-1])
    return sizes


@given(fixed=st.integers(0, 10**9), slope=st.integers(1, 10**6), samples=st.integers(1, 5000))
@example(fixed=0, slope=1, samples=1)
def test_no_pass_takes_more_than_there_is_and_the_last_takes_most(
    fixed: int, slope: int, samples: int
) -> None:
    room = math.ceil((fixed + slope * samples) / (1 - SPARE))
    sizes = sizes_until_settled(fixed, slope, room)
    assert all(fixed + slope * size <= room for size in sizes)
    assert all(later <= 2 * earlier for earlier, later in pairwise(sizes))
    # With one size known nothing tells what passes take without samples: where that is most of the room, 1 it stays.
    assert sizes[-1] >= samples - 1 or fixed > samples * slope / 2


def test_without_a_pass_there_is_one_sample() -> None:
    assert Appetite().most(10**12) == 1
    assert not Appetite().has_learned


def test_a_room_without_limit_is_filled_by_doubling() -> None:
    appetite, found = Appetite(), list[int]()
    for _ in range(5):
        found.append(appetite.most(math.inf))
        appetite.learn(found[-1], 100 * found[-1])
    assert found == [1, 2, 4, 8, 16]


def test_a_smaller_room_is_followed_at_once() -> None:
    appetite = Appetite()
    for samples in (1, 2, 4, 8):
        appetite.learn(samples, 50 + 10 * samples)
    assert appetite.most(1000) == 16
    assert appetite.most(100 / (1 - SPARE)) == 5
    assert appetite.most(0) == 1


def test_the_hungriest_pass_of_a_size_counts() -> None:
    appetite = Appetite()
    for nbytes in (100, 300, 200):
        appetite.learn(4, nbytes)
    assert appetite.capacity(300 / (1 - SPARE)) == 4


def test_what_is_known_to_be_too_little_counts_where_it_is_more_than_was_expected() -> None:
    appetite = Appetite()
    appetite.learn(1, 1000, at_least=True)
    assert not appetite.has_learned
    appetite.learn(1, 10)
    appetite.learn(8, 79, at_least=True)
    assert appetite.capacity(800 / (1 - SPARE)) == 80
    appetite.learn(8, 160, at_least=True)
    assert appetite.capacity(800 / (1 - SPARE)) < 40


def test_passes_that_take_nothing_more_have_no_limit() -> None:
    appetite = Appetite()
    appetite.learn(1, 500)
    appetite.learn(2, 500)
    assert math.isinf(appetite.capacity(1000))
    assert appetite.capacity(100) == 1
