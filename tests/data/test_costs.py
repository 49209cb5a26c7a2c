"""Batches divided by the costs of their samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balance.base import Equal, Fixed
from evener.balance.shares import solve
from evener.data.costs import CostDivision, Costs, costs_of, divide_by_cost
from evener.data.loader import Loader
from evener.data.sampler import Order
from evener.errors import DataError, ShareError, TaskError


def drawn_costs(draw: Any, size: int) -> np.ndarray[Any, Any]:
    number = st.one_of(st.integers(1, 2000), st.floats(1e-3, 1e6))
    return np.array(draw(st.lists(number, min_size=size, max_size=size)), dtype=np.float64)


@st.composite
def divisions(draw: Any) -> dict[str, Any]:
    """Batches with weights and limits that can hold them."""
    ranks, multiple = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    size = draw(st.integers(1, 60))
    weights = draw(st.lists(st.floats(0, 5), min_size=ranks, max_size=ranks).filter(any))
    caps = draw(st.lists(st.none() | st.integers(0, 60), min_size=ranks, max_size=ranks))
    caps[weights.index(max(weights))] = None
    fractions = [weight / sum(weights) for weight in weights]
    beyond = [lambda n, part=size * fraction: n - part for fraction in fractions]
    micro_batch = draw(st.none() | st.integers(1, 20).map(lambda units: units * multiple))
    return {
        "costs": drawn_costs(draw, size),
        "fractions": fractions,
        "shares": solve(
            beyond, size, [cap if part else 0 for cap, part in zip(caps, fractions, strict=True)], multiple
        ),
        "micro_batch": micro_batch,
        "max_shares": caps,
        "share_multiple_of": multiple,
    }


@given(divisions())
def test_every_sample_is_in_one_run_within_the_limits(case: dict[str, Any]) -> None:
    counts = divide_by_cost(**case)
    size, micro_batch, multiple = len(case["costs"]), case["micro_batch"], case["share_multiple_of"]
    rows = counts.sum(axis=1).tolist()
    assert counts.min() >= 0
    assert sum(rows) == size
    assert all(row == micro_batch for row in rows[:-1])
    taken = counts.sum(axis=0).tolist()
    for n, usual, part, cap in zip(taken, case["shares"], case["fractions"], case["max_shares"], strict=True):
        assert n == 0 or part > 0
        assert cap is None or n <= cap
        assert n > 0 or usual < multiple or (micro_batch and multiple > 1)
    assert sum(n % multiple > 0 for n in taken) <= (1 if size % multiple else 0)
    assert math.isclose(costs_of(case["costs"], counts).sum(), case["costs"].sum())


@given(st.data(), st.integers(1, 5))
def test_costs_are_within_one_sample_of_what_is_wanted(data: Any, ranks: int) -> None:
    costs = drawn_costs(data.draw, 60)
    parts = data.draw(st.lists(st.integers(1, 9), min_size=ranks, max_size=ranks))
    fractions = [part / sum(parts) for part in parts]
    counts = divide_by_cost(costs, fractions, Fixed(parts).shares(0, 60))
    wanted = costs.sum() * np.array(fractions)
    if wanted.min() >= costs.max():  # else a rank with one sample may be far above
        apart = np.abs(costs_of(costs, counts) - wanted)
        assert apart.max() <= costs.max() * (1 + 1e-9)


@given(st.integers(1, 5), st.integers(1, 40), st.none() | st.integers(1, 10))
def test_equal_costs_give_equal_shares(ranks: int, size: int, micro_batch: int | None) -> None:
    balancer = Equal(ranks)
    counts = divide_by_cost(
        np.full(size, 7.0), balancer.fractions(0, size), balancer.shares(0, size), micro_batch
    )
    taken = counts.sum(axis=0)
    assert taken.max() - taken.min() <= 1


def test_the_drawing_of_the_module() -> None:
    costs = np.array([9.0, 1, 1, 1, 2, 2, 3, 1, 5])
    counts = divide_by_cost(costs, [1 / 2, 1 / 6, 1 / 3], [5, 1, 3])
    assert counts.tolist() == [[4, 2, 3]]
    assert costs_of(costs, counts).tolist() == [12, 4, 9]


def test_what_a_capped_rank_leaves_goes_to_ranks_that_want_some() -> None:
    counts = divide_by_cost(np.ones(8), [0.5, 0.0, 0.5], [2, 0, 6], max_shares=[2, None, None])
    assert counts.tolist() == [[2, 0, 6]]


def test_micro_batches_make_up_for_those_before() -> None:
    """A micro-batch alone can be cut at 9 : 2 only, and ten of them nearly at half."""
    costs = np.array([9.0, 1.0, 1.0] * 10)
    alone = divide_by_cost(costs[:3], [0.5, 0.5], [2, 1])
    assert costs_of(costs[:3], alone).tolist() == [9, 2]
    together = divide_by_cost(costs, [0.5, 0.5], [15, 15], micro_batch=3)
    assert np.abs(costs_of(costs, together) - 55).max() <= 9


def test_many_ranks_are_cut_without_a_loop_over_them() -> None:
    costs = np.random.default_rng(0).lognormal(5, 1, 16384)
    ranks = 4096
    counts = divide_by_cost(costs, [1 / ranks] * ranks, [4] * ranks)
    assert counts.shape == (1, ranks)
    assert counts.min() >= 1
    assert counts.sum() == 16384


def test_weights_are_not_rounded_to_samples_of_equal_cost() -> None:
    assert Equal(3).shares(0, 8) == [3, 3, 2]
    assert Equal(3).fractions(0, 8) == pytest.approx([1 / 3] * 3)
    capped = Fixed([1, 1], max_shares=[2, None])
    assert capped.fractions(0, 8) == [2 / 8, 6 / 8]


@pytest.mark.parametrize("fractions", [[0.5], [0.5, math.nan], [-0.5, 1.5], [0.0, 0.0]], ids=str)
def test_fractions_that_cannot_divide_are_refused(fractions: list[float]) -> None:
    with pytest.raises(ShareError, match="of the cost of a batch for 2 ranks: give one for each rank"):
        divide_by_cost(np.ones(4), fractions, [2, 2])


# Costs


class Table:
    column_names = ("text", "tokens")

    def __init__(self, tokens: list[float]) -> None:
        self.tokens_of = tokens

    def __len__(self) -> int:
        return len(self.tokens_of)

    def __getitem__(self, key: Any) -> Any:
        assert key == "tokens", "no sample is read"
        return self.tokens_of


@pytest.mark.parametrize(
    "cost",
    [lambda index: [3, 1, 4][index], [3, 1, 4], np.array([3, 1, 4], np.int32), (3.0, 1.0, 4.0), "tokens"],
)
def test_costs_are_a_function_a_sequence_or_a_column(cost: Any) -> None:
    costs = Costs(cost, Table([3, 1, 4]))
    assert costs(np.array([2, 0, 2])).tolist() == [4, 3, 4]
    assert costs.mean == pytest.approx(8 / 3)


def test_an_attribute_of_the_data_set_may_hold_the_costs() -> None:
    table = Table([1, 1])
    table.lengths = [5, 6]  # type: ignore[attr-defined]
    assert Costs("lengths", table)(np.array([1, 0])).tolist() == [6, 5]


def wrong(cost: float) -> list[float]:
    return [1.0] * 7 + [cost] + [1.0] * 7


@pytest.mark.parametrize("cost", [math.nan, math.inf, 0.0, -1.0])
def test_a_bad_cost_is_named(cost: float) -> None:
    message = f"Task.cost of sample 7 of the training set is {cost:g}; a cost must be positive and finite"
    with pytest.raises(DataError, match=message):
        Costs(wrong(cost), range(15))
    with pytest.raises(DataError, match=message):
        Costs(lambda index: wrong(cost)[index], range(15))


def test_a_function_that_fails_is_named_with_its_sample() -> None:
    with pytest.raises(DataError, match=r"failed for sample 2 of the training set: IndexError: list index"):
        Costs(lambda index: [1, 2][index], range(3))
    with pytest.raises(DataError, match="failed for sample 0 of the training set: TypeError"):
        Costs(lambda index: None, range(3))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ([1, 2], r"shape \(2,\), and the training set 3 samples"),
        (np.ones((3, 1)), r"shape \(3, 1\)"),
        (["a", "b", "c"], "cannot be read as numbers"),
        ("length", "has no column or attribute of this name; its columns are text, tokens"),
    ],
)
def test_costs_that_do_not_fit_the_data_set_are_refused(cost: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        Costs(cost, Table([1, 1, 1]))


# Reading


def batches_of(rank: int, ranks: int, costs: list[float], **options: Any) -> list[Any]:
    balancer = Equal(ranks)
    by_cost = CostDivision(Costs(costs, costs), balancer.fractions)
    dataset = [(float(index), float(index)) for index in range(len(costs))]
    order = Order(len(costs), seed=3)
    with Loader(
        dataset, order, batch_size=8, rank=rank, world_size=ranks, shares=balancer.shares, by_cost=by_cost,
        **options,
    ) as loader:  # fmt: skip
        return list(loader)


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_ranks_read_the_samples_of_the_order_cut_by_cost(micro_batch: int | None) -> None:
    costs = np.random.default_rng(1).lognormal(3, 1, 37).tolist()
    ranks = [batches_of(rank, 3, costs, micro_batch=micro_batch) for rank in range(3)]
    order, position = Order(37, seed=3), 0
    for batches in zip(*ranks, strict=True):
        assert len({(batch.shares, batch.costs) for batch in batches}) == 1
        found = [
            micro.samples.tolist()
            for micros in zip(*(batch.micro_batches for batch in batches), strict=True)
            for micro in micros
            if micro.weight
        ]
        size = batches[0].size
        assert [sample for each in found for sample in each] == order.ids(
            0, position, position + size
        ).tolist()
        for rank, batch in enumerate(batches):
            own = [
                sample for micro in batch.micro_batches if micro.weight for sample in micro.samples.tolist()
            ]
            assert len(own) == batch.shares[rank]
            assert sum(costs[sample] for sample in own) == pytest.approx(batch.costs[rank])
        position += size
    assert position == 37


def test_a_placeholder_is_the_cheapest_sample() -> None:
    balancer = Fixed([1, 0])
    by_cost = CostDivision(Costs([5, 3, 1, 4], range(4)), balancer.fractions)
    dataset = [(float(index), 0.0) for index in range(4)]
    with Loader(
        dataset, None, batch_size=4, rank=1, world_size=2, shares=balancer.shares, by_cost=by_cost
    ) as loader:
        (batch,) = loader
    (micro,) = batch.micro_batches
    assert (micro.samples.tolist(), micro.weight, batch.costs) == ([2], 0, (13.0, 0.0))
