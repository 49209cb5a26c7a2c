from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import default_collate

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
    [
        (5, "an int"),
        ((1, 2, 3), "a tuple of length 3"),
        ({"x": 1}, "a dict with x"),
        ({"labels": 1}, "a dict with labels"),
        (torch.zeros(2), "a Tensor"),
    ],
)
def test_an_item_that_is_no_pair_is_named(item: Any, seen: str) -> None:
    with pytest.raises(DataError, match=f"sample 17 of the training set is {seen}, not a pair"):
        collate_pairs([(1, 2), item], [3, 17], "training set")


class Encoding(UserDict[str, Any]):
    """As Hugging Face's BatchEncoding."""


@pytest.mark.parametrize("kind", [dict, Encoding])
@pytest.mark.parametrize("key", ["labels", "label"])
def test_what_a_mapping_holds_besides_its_labels_are_the_inputs(kind: Any, key: str) -> None:
    inputs, targets = stack(*(kind({"ids": torch.full((2,), n), key: n, "mask": None}) for n in (3, 4)))
    assert type(inputs) is dict
    assert inputs["ids"].tolist() == [[3, 3], [4, 4]]
    assert inputs.keys() == {"ids", "mask"}
    assert targets.tolist() == [3, 4]
    collated = collate_with(
        lambda items: kind({"ids": items, key: len(items)}), [1, 2], [0, 1], "training set"
    )
    assert collated == ({"ids": [1, 2]}, 2)


def test_labels_come_before_a_label() -> None:
    inputs, targets = stack({"x": 1, "label": 2, "labels": 3})
    assert (inputs["label"].tolist(), targets.tolist()) == ([2], [3])


def test_a_mapping_without_labels_is_no_batch() -> None:
    with pytest.raises(
        DataError, match=r"made a dict with ids, target of samples 0 .*or a dict with 'labels'"
    ):
        collate_with(lambda items: {"ids": 1, "target": 2}, [1], [0], "training set")


def test_a_data_set_that_gives_too_few_items_is_named() -> None:
    with pytest.raises(DataError, match="gave 1 items for 2 samples"):
        collate_pairs([(1, 2)], [3, 17], "training set")
    with pytest.raises(DataError, match="gave 1 items for 2 samples"):
        collate_with(default_collate, [(1, 2)], [3, 17], "training set")


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


def test_a_full_shared_memory_is_not_taken_for_items_that_do_not_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_1_2>: No space left on device (28)"
        )

    monkeypatch.setattr("evener.data.collate._stack", full)
    with pytest.raises(
        DataError, match=r"samples 4, 5 of the training set found no room in /dev/shm.*--shm-size"
    ):
        collate_pairs([(torch.zeros(2), 0)] * 2, [4, 5], "training set")
