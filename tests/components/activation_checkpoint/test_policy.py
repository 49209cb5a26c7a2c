"""The choice of blocks for a budget: always within it, and never slower than the best, tried by brute force."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.components.activation_checkpoint import policy
from evener.components.activation_checkpoint.policy import (
    AGAIN,
    KEPT,
    KEPT_PRODUCTS,
    Measured,
    Moment,
    Way,
    choose,
    chosen,
)

WAYS = st.builds(Way, st.just("any"), st.integers(0, 30), st.floats(0, 10))
BLOCKS = st.lists(st.lists(WAYS, min_size=1, max_size=3), min_size=0, max_size=5)


def fits(blocks: Any, rooms: Any, places: Any) -> bool:
    kept = [ways[place].nbytes for ways, place in zip(blocks, places, strict=True)]
    return all(sum(kept[:depth]) <= room for depth, room in enumerate(rooms))


def seconds(blocks: Any, places: Any) -> float:
    return sum(ways[place].seconds for ways, place in zip(blocks, places, strict=True))


@st.composite
def problems(draw: Any) -> Any:
    blocks = draw(BLOCKS)
    rooms = draw(st.lists(st.integers(-2, 90), min_size=len(blocks) + 1, max_size=len(blocks) + 1))
    return blocks, rooms


@given(problems())
def test_no_choice_that_fits_takes_less_time(problem: Any) -> None:
    blocks, rooms = problem
    fitting = [places for places in product(*map(range, map(len, blocks))) if fits(blocks, rooms, places)]
    found = choose(blocks, rooms)
    assert (found is None) == (not fitting)
    if found is not None:
        assert fits(blocks, rooms, found)
        best = min(seconds(blocks, places) for places in fitting)
        assert seconds(blocks, found) == pytest.approx(best)


@given(problems())
def test_of_many_beginnings_some_are_left_out_and_what_is_found_fits(problem: Any) -> None:
    blocks, rooms = problem
    with patch.object(policy, "BEGINNINGS", 2):
        found = choose(blocks, rooms)
        grid = max(1, max(rooms) // 2)
    if found is not None:
        assert fits(blocks, rooms, found)
    smaller = [room - grid * depth for depth, room in enumerate(rooms)]
    within = [seconds(blocks, p) for p in product(*map(range, map(len, blocks))) if fits(blocks, smaller, p)]
    if within:
        assert found is not None
        assert seconds(blocks, found) <= min(within) + 1e-9


def test_a_room_for_each_depth_is_needed() -> None:
    with pytest.raises(ValueError, match="1 rooms for 1 blocks; there must be one more"):
        choose([[Way(KEPT, 1, 0.0)]], [1])


def way(kept: int, again: float, products: tuple[int, float] | None = None) -> tuple[Way, ...]:
    middle = (Way(KEPT_PRODUCTS, *products),) if products else ()
    return (Way(KEPT, kept, 0.0), *middle, Way(AGAIN, 0, again))


def chain(*blocks: tuple[Way, ...], rest: int = 10, transient: int = 0) -> Measured:
    """Blocks in a row, each of which holds ``transient`` bytes more while it is computed again."""
    names = [f"b{place}" for place in range(len(blocks))]
    moments = [
        Moment(rest, tuple(names)),
        *(Moment(rest + transient, tuple(names[:i])) for i in range(len(names))),
    ]
    kept = max(m.nbytes + sum(blocks[names.index(n)][0].nbytes for n in m.waiting) for m in moments)
    return Measured(dict(zip(names, blocks, strict=True)), tuple(moments), kept, 10.0)


def names(found: Any) -> list[str]:
    return [each.name for each in found.values()]


def test_the_cheapest_block_for_its_bytes_is_computed_again() -> None:
    rank = chain(way(8, 3.0), way(8, 1.0), way(8, 2.0))
    assert rank.kept_peak == 34
    assert rank.least == 10
    assert names(chosen([rank], [34])) == [KEPT] * 3
    assert names(chosen([rank], [33])) == [KEPT, AGAIN, KEPT]
    assert names(chosen([rank], [18])) == [KEPT, AGAIN, AGAIN]
    assert chosen([rank], [9]) is None
    found = chosen([rank], [18])
    assert found is not None
    assert rank.peak(found) == 18
    assert rank.times(found) == pytest.approx(1 + 3 / 4)  # a step of 10 s with all again takes 4 s with none


def test_what_the_block_at_work_holds_leaves_room_for_those_before_it_alone() -> None:
    """The last block may be kept: while any is computed again, it has gone or not come."""
    rank = chain(way(8, 1.0), way(8, 1.0), transient=8)
    assert names(chosen([rank], [18])) == [AGAIN, KEPT]
    assert names(chosen([rank], [26])) == [KEPT, KEPT]


def test_products_are_kept_where_there_is_room_for_them() -> None:
    rank = chain(way(8, 4.0, (4, 1.0)), way(8, 4.0, (4, 1.0)))
    assert names(chosen([rank], [18])) == [KEPT_PRODUCTS, KEPT_PRODUCTS]
    assert names(chosen([rank], [22])) in ([KEPT_PRODUCTS, KEPT], [KEPT, KEPT_PRODUCTS])


def test_ranks_choose_together_for_the_one_with_the_least_room() -> None:
    roomy, narrow = chain(way(4, 1.0), way(4, 5.0)), chain(way(8, 1.0), way(8, 2.0))
    assert names(chosen([roomy, narrow], [100, 18])) == [AGAIN, KEPT]
    assert names(chosen([roomy, narrow], [10, 100])) == [AGAIN, AGAIN]


def test_a_way_that_one_rank_does_not_have_is_taken_by_none() -> None:
    one, other = chain(way(8, 4.0, (4, 1.0))), chain(way(8, 4.0))
    assert names(chosen([one, other], [15, 15])) == [AGAIN]


def test_a_block_that_only_some_ranks_call_is_theirs() -> None:
    one, other = chain(way(8, 4.0)), chain(way(8, 4.0), way(8, 1.0))
    assert names(chosen([one, other], [100, 18])) == [KEPT, AGAIN]
