"""Rows of tensors are what PyTorch's DataLoader makes of the same samples, one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from evener.data.tensor_rows import rows_of

DATA = TensorDataset(torch.rand(10, 3), torch.arange(10), torch.arange(10, dtype=torch.int32).view(10, 1))


@pytest.mark.parametrize(
    "dataset", [DATA, Subset(DATA, [7, 1, 1, 4]), Subset(Subset(DATA, [9, 8, 7, 6]), [3, 0, 2])]
)
def test_rows_are_the_default_batch(dataset: Any) -> None:
    rows = rows_of(dataset, default_collate)
    assert rows is not None
    numbers = [2, 0, -1]
    expected = next(iter(DataLoader(dataset, batch_sampler=[numbers])))
    found = rows(numbers)
    assert type(found) is type(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())


class Counted(TensorDataset):
    pass


@pytest.mark.parametrize(
    ("dataset", "collate"),
    [
        (Counted(torch.rand(3)), default_collate),
        (Subset(Counted(torch.rand(3)), [0]), default_collate),
        (DATA, lambda items: default_collate(items)),
        (TensorDataset(torch.rand(3, requires_grad=True)), default_collate),
        ([1, 2, 3], default_collate),
    ],
)
def test_other_data_are_read_one_by_one(dataset: Any, collate: Any) -> None:
    assert rows_of(dataset, collate) is None


def test_a_number_too_large_is_refused() -> None:
    rows = rows_of(DATA, default_collate)
    assert rows is not None
    with pytest.raises(IndexError):
        rows([10])
