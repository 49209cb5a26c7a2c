from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from evener.data.collate import collate_pairs, collate_with
from evener.errors import DataError


class Point(NamedTuple):
    x: int
    y: int


def stack(*items: Any) -> tuple[Any, Any]:
    return collate_pairs(list(items), range(len(items)), "training set")


def test_tensors_and_numbers_stack() -> None:
    inputs, targets = stack((torch.zeros(3), 1), (torch.ones(3), 2))
    assert inputs.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert targets.tolist() == [1, 2]


def test_tuples_stay_tuples_and_none_stays_none() -> None:
    inputs, targets = stack(((1, None, Point(1, 2)), {"a": (1,)}), ((3, None, Point(3, 4)), {"a": (2,)}))
    assert type(inputs) is tuple
    assert inputs[0].tolist() == [1, 3]
    assert inputs[1] is None
    assert isinstance(inputs[2], Point)
    assert inputs[2].y.tolist() == [2, 4]
    assert targets["a"][0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("item", "seen"),
    [(5, "an int"), ((1, 2, 3), "a tuple of length 3"), ({"x": 1}, "a dict"), (torch.zeros(2), "a Tensor")],
)
def test_an_item_that_is_no_pair_is_named(item: Any, seen: str) -> None:
    with pytest.raises(DataError, match=f"sample 17 of the training set is {seen}, not a pair"):
        collate_pairs([(1, 2), item], [3, 17], "training set")


def test_a_data_set_that_gives_too_few_items_is_named() -> None:
    with pytest.raises(DataError, match="gave 1 items for 2 samples"):
        collate_pairs([(1, 2)], [3, 17], "training set")


@pytest.mark.parametrize(
    "items",
    [
        [(torch.zeros(2), 0), (torch.zeros(3), 0)],
        [(None, 0), (1, 0)],
        [((1, 2), 0), ((1,), 0)],
        [({"a": 1}, 0), ({"b": 1}, 0)],
        [(object(), 0), (object(), 0)],
    ],
)
def test_items_that_do_not_stack_say_what_to_do(items: list[Any]) -> None:
    with pytest.raises(DataError, match=r"samples 0, 1 of the training set do not stack.*collate function"):
        stack(*items)


def test_the_users_function_gets_the_items_and_must_return_a_pair() -> None:
    assert collate_with(lambda items: [sum(items), len(items)], [1, 2, 3], [0, 1, 2], "training set") == (
        6,
        3,
    )
    with pytest.raises(DataError, match=r"made a float of samples 0, 1, 2 of the training set"):
        collate_with(lambda items: 1.0, [1, 2, 3], [0, 1, 2], "training set")
