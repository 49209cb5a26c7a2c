"""Owners of whole weights: how evenly costs are divided, by speed and within memory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.components.optim.owners import choose_owners, update_cost
from evener.components.optim.whole_updates import OwnershipTerms
from evener.distributed.mesh import Layout

FREE = [math.inf] * 4


def loads(costs: list[float], speeds: list[float], owners: list[int]) -> list[float]:
    of_rank = [[c for c, o in zip(costs, owners, strict=True) if o == rank] for rank in range(len(speeds))]
    return [sum(each) / speed for each, speed in zip(of_rank, speeds, strict=True)]


def test_the_example_of_the_module() -> None:
    costs = [6.0, 5, 4, 3, 2, 1]
    owners = choose_owners(costs, [1] * 6, [2, 1], FREE[:2])
    assert owners == [0, 1, 0, 0, 1, 0]
    assert loads(costs, [2, 1], owners) == [7, 7]


@given(
    st.lists(st.floats(1, 100), min_size=1, max_size=30),
    st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=1, max_size=4),
)
def test_no_rank_is_done_much_later_than_the_best_division(costs: list[float], speeds: list[float]) -> None:
    """The last weight that a rank got found it the soonest: so the time is at most that of a perfect division and of
    one weight more on the fastest rank for which that is so."""
    owners = choose_owners(costs, [1.0] * len(costs), speeds, FREE[: len(speeds)])
    perfect, most = sum(costs) / sum(speeds), max(costs) / max(speeds)
    assert max(loads(costs, speeds, owners)) <= perfect + (len(speeds) - 1) * most + 1e-9
    assert owners == choose_owners(costs, [1.0] * len(costs), speeds, FREE[: len(speeds)])


def test_a_rank_owns_no_more_than_it_has_memory_for() -> None:
    assert choose_owners([4, 4, 4, 4], [3, 3, 3, 3], [10, 1], [6, 100]) == [0, 0, 1, 1]
    assert choose_owners([4, 4], [9, 9], [1, 1], [5, 7]) == [1, 0]  # fits nowhere: most is left there


def test_a_rank_without_speed_owns_nothing() -> None:
    assert choose_owners([3, 2, 1], [1, 1, 1], [1, 0], FREE[:2]) == [0, 0, 0]


@pytest.mark.parametrize(
    ("shape", "products"),
    [((8, 4), 8 * 4 * 4), ((4, 8), 8 * 4 * 4), ((6, 2, 3), 6 * 6 * 6), ((9,), 9), ((), 1), ((0, 3), 0)],
)
def test_the_cost_of_a_matrix_is_that_of_its_product_with_itself(
    shape: tuple[int, ...], products: int
) -> None:
    assert update_cost(shape) == products + 16 * math.prod(shape)


def test_replicas_choose_by_the_least_able_of_them() -> None:
    terms = OwnershipTerms(frozenset(), (1.0, 4.0, 2.0, 3.0), (9.0, 8.0, 7.0, 6.0))
    layout = Layout({"data": 2, "shard": 2})
    for replica in (0, 1):
        found = terms.along(layout, ("shard",), (2 * replica, 2 * replica + 1))
        assert (found.speeds, found.rooms) == ((1.0, 3.0), (7.0, 6.0))
