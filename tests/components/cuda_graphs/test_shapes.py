"""Which batches get a graph."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.components.cuda_graphs.replays import CHECKED_EVERY, is_compared
from evener.components.cuda_graphs.shapes import (
    MOST_GRAPHS,
    MOST_SHAPES,
    SEEN,
    WORTHWHILE,
    GraphCache,
    UnknownShapeError,
    shape_of,
)

CPU = torch.device("cpu")


@dataclass
class Pair:
    words: Tensor
    lengths: tuple[Tensor, ...]


@dataclass
class Counter:
    replays: int = 0


def test_batches_of_equal_shapes_have_equal_keys() -> None:
    def tree() -> Any:
        return {"a": [torch.rand(3, 2), None], "b": Pair(torch.zeros(3, dtype=torch.long), (torch.ones(1),))}

    assert shape_of(tree(), CPU) == shape_of(tree(), CPU)
    assert hash(shape_of(tree(), CPU)) == hash(shape_of(tree(), CPU))


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(4, 3), 1),
        (torch.zeros(3, 4).t().contiguous().t()[:, :2], 1),
        (torch.zeros(3, 2, dtype=torch.float64), 1),
        (torch.zeros(2, 3).t(), 1),
        (torch.zeros(3, 2), 2),
        (torch.zeros(3, 2), True),
        [torch.zeros(3, 2), 1],
        (torch.zeros(3, 2),),
    ],
    ids=["size", "strides", "type", "transposed", "number", "kind of number", "list", "fewer"],
)
def test_others_have_other_keys(other: Any) -> None:
    assert shape_of(other, CPU) != shape_of((torch.zeros(3, 2), 1), CPU)


@pytest.mark.parametrize(
    "leaf",
    [
        torch.zeros(2, device="meta"),
        torch.eye(2).to_sparse(),
        nn.Parameter(torch.zeros(2)),
        torch.zeros(2, requires_grad=True),
        {1},
    ],
    ids=["elsewhere", "sparse", "parameter", "gradient", "set"],
)
def test_what_a_graph_cannot_take_has_no_key(leaf: Any) -> None:
    with pytest.raises(UnknownShapeError):
        shape_of([leaf], CPU)


def test_a_shape_is_due_when_it_has_come_often() -> None:
    cache = GraphCache[Counter]()
    assert [cache.is_due("a") for _ in range(SEEN)] == [False] * (SEEN - 1) + [True]
    assert not cache.is_due("b")


def test_shapes_that_never_come_again_are_forgotten() -> None:
    cache = GraphCache[Counter]()
    cache.is_due("a")
    for number in range(MOST_SHAPES):
        cache.is_due(number)
    assert [cache.is_due("a") for _ in range(SEEN)] == [False] * (SEEN - 1) + [True]


def test_the_graph_least_recently_used_makes_room() -> None:
    cache = GraphCache[Counter]()
    for number in range(MOST_GRAPHS):
        cache.keep(number, Counter(WORTHWHILE))
    assert cache.find(0)
    cache.keep("new", Counter())
    assert len(cache) == MOST_GRAPHS
    assert cache.find(0)
    assert cache.find("new")
    assert not cache.find(1)
    assert cache.patience == SEEN


def test_graphs_that_were_hardly_used_make_others_wait() -> None:
    cache = GraphCache[Counter]()
    for number in range(MOST_GRAPHS + 1):
        cache.keep(number, Counter(WORTHWHILE - 1))
    assert cache.patience == 2 * SEEN
    cache.clear()
    assert cache.patience == 4 * SEEN
    assert not len(cache)
    cache.clear()  # there was none
    cache.keep("often", Counter(WORTHWHILE))
    cache.clear()
    assert cache.patience == 4 * SEEN


def test_replays_are_compared_ever_more_rarely_and_never_more_rarely_than_said() -> None:
    compared = [number for number in range(1, 5 * CHECKED_EVERY) if is_compared(number)]
    assert compared[:5] == [1, 2, 4, 8, 16]
    gaps = [after - before for before, after in itertools.pairwise(compared)]
    assert max(gaps) <= CHECKED_EVERY
