"""The largest pass is found from below."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from evener.hardware.memory.activation_model import SPARE, ActivationModel

Moments = list[tuple[int, int]]


def peak(moments: Moments, samples: int) -> int:
    """Of a pass: at each moment there are bytes without samples, and for each."""
    return max(fixed + slope * samples for fixed, slope in moments)


def sizes_until_settled(moments: Moments, room: int) -> list[int]:
    """Those of passes of which each is as large as it may be."""
    appetite, sizes = ActivationModel(), list[int]()
    while sizes.count(appetite.most(room)) < 2:
        sizes.append(appetite.most(room))
        appetite.learn(sizes[-1], peak(moments, sizes[-1]))
    return sizes


@given(
    moments=st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 10**6)), min_size=1, max_size=4),
    samples=st.integers(1, 5000),
)
@example(moments=[(300, 0), (0, 50)], samples=6)
def test_no_pass_takes_more_than_there_is_and_the_last_takes_nearly_all(
    moments: Moments, samples: int
) -> None:
    """Also where another moment is the hungriest beyond the sizes that are known."""
    room = math.ceil(peak(moments, samples) / (1 - SPARE))
    sizes = sizes_until_settled(moments, room)
    assert all(peak(moments, size) <= room for size in sizes)
    assert all(later <= 2 * earlier for earlier, later in pairwise(sizes))
    last = sizes[-1]
    assert peak(moments, last) * (last + 1) > 0.999 * room * (1 - SPARE) * last, (
        "one more was not sure to fit"
    )


def test_without_a_pass_there_is_one_sample() -> None:
    assert ActivationModel().most(10**12) == 1
    assert not ActivationModel().has_learned


def test_a_room_without_limit_is_filled_by_doubling() -> None:
    appetite, found = ActivationModel(), list[int]()
    for _ in range(5):
        found.append(appetite.most(math.inf))
        appetite.learn(found[-1], 100 * found[-1])
    assert found == [1, 2, 4, 8, 16]


def test_a_smaller_room_is_followed_at_once() -> None:
    appetite = ActivationModel()
    for samples in (1, 2, 4, 8):
        appetite.learn(samples, 50 + 10 * samples)
    assert appetite.most(1000) == 16
    assert appetite.most(100.001 / (1 - SPARE)) == 5
    assert appetite.most(0) == 1


def test_the_hungriest_pass_of_a_size_counts() -> None:
    appetite = ActivationModel()
    for nbytes in (100, 300, 200):
        appetite.learn(4, nbytes)
    assert appetite.capacity(300.001 / (1 - SPARE)) == 4


def test_what_is_known_to_be_too_little_counts_where_it_is_more_than_was_thought_possible() -> None:
    appetite = ActivationModel()
    appetite.learn(1, 1000, at_least=True)
    assert not appetite.has_learned
    appetite.learn(1, 10)
    appetite.learn(8, 79, at_least=True)
    assert appetite.capacity(800.001 / (1 - SPARE)) == 80
    appetite.learn(8, 160, at_least=True)
    assert appetite.capacity(800.001 / (1 - SPARE)) == 40


def test_a_pass_that_took_less_than_a_smaller_one_promises_nothing() -> None:
    appetite = ActivationModel()
    appetite.learn(1, 500)
    appetite.learn(2, 300)
    assert appetite.capacity(100) == 1
    assert appetite.capacity(400) == 1
    assert appetite.capacity(1001 / (1 - SPARE)) == 4
