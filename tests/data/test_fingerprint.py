from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from evener.data.fingerprint import LOOKS, difference, digest_if_any, digest_of, fingerprint


def numbers(count: int = 100, shift: float = 0.0) -> TensorDataset:
    return TensorDataset(torch.arange(count, dtype=torch.float64) + shift)


def test_the_first_and_the_last_are_among_the_samples_that_are_looked_at() -> None:
    found = fingerprint(numbers())
    assert len(found) == LOOKS
    assert {0, 99} <= found.keys()
    assert list(fingerprint(numbers(3))) == [0, 1, 2]


def test_the_same_data_have_no_difference_and_others_have() -> None:
    assert difference(fingerprint(numbers()), fingerprint(numbers())) == ""
    other = numbers()
    other.tensors[0][99] = -1
    assert difference(fingerprint(numbers()), fingerprint(other)) == "sample 99 is not the same"


def test_a_digest_sees_type_shape_and_what_is_no_tensor() -> None:
    ones = torch.ones(4)
    items = [ones, ones.double(), ones.view(2, 2), (ones, 1), (ones, "1"), (ones, None), torch.zeros(0), []]
    assert len({digest_of(item) for item in items}) == len(items)
    assert digest_of({"a": ones, "b": np.arange(3)}) == digest_of({"a": ones.clone(), "b": np.arange(3)})


def test_the_digest_of_an_array_is_that_of_its_numbers_and_not_of_how_numpy_pickles_it() -> None:
    array = np.arange(6, dtype="<i8").reshape(2, 3)
    written = b"<i8 (2, 3)" + b"".join(number.to_bytes(8, "little") for number in range(6))
    assert digest_of(array) == digest_of(np.asfortranarray(array)) == hashlib.sha256(written).hexdigest()
    assert len({digest_of(item) for item in (array, array.T, np.int64(1), np.array([1]))}) == 4
    assert digest_of(np.array(["a", None], dtype=object)) != digest_of(np.array(["b", None], dtype=object))


def test_a_set_has_the_digest_of_its_items_in_any_order() -> None:
    orders = "same", "other", "third"
    first, second = dict.fromkeys(orders), dict.fromkeys(reversed(orders))
    assert digest_of({*first}) == digest_of(frozenset(second)) != digest_of({"same"})
    code = "from evener.data.fingerprint import digest_of; print(digest_of({*'abcdefgh'}))"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": seed},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout == f"{digest_of({*'abcdefgh'})}\n"


def test_a_view_of_the_conjugate_has_the_digest_of_its_numbers() -> None:
    view = torch.tensor([1 + 2j]).conj()
    assert digest_of(view) == digest_of(view.resolve_conj())


@pytest.mark.parametrize("item", [lambda: 3, torch.empty(2, device="meta")], ids=["function", "meta"])
def test_what_has_no_digest_is_no_error(item: Any) -> None:
    assert digest_if_any((torch.ones(2), item)) == ""


class Draws(Dataset[Any]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        if index == 8:
            raise OSError("torn")
        return (index if index % 2 else torch.rand(1) + np.random.rand() + random.random(),)


def test_samples_that_are_drawn_or_cannot_be_read_are_left_out_and_leave_no_trace() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert set(fingerprint(Draws())) == {1, 3, 5, 7}
    assert torch.equal(torch.rand(1), expected)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_what_has_no_numbers_has_none() -> None:
    assert fingerprint(Stream()) == {}
    assert fingerprint(numbers(0)) == {}
