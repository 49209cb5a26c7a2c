"""Batches of a ``TensorDataset``, read as rows of its tensors: what collating the items one by one would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

Rows = Callable[[Sequence[int]], list[Tensor]]


def rows_of(dataset: Any, collate: Any) -> Rows | None:
    """Returns a function of sample numbers that returns PyTorch's default batch of these samples.

    Returns:
        None if the data set is neither a ``TensorDataset`` of plain CPU tensors nor a ``Subset`` of one, or has a
        collate function of its own.
    """
    if collate is not default_collate:
        return None
    if type(dataset) is Subset:
        inner = rows_of(dataset.dataset, collate)
        return inner and (lambda numbers: inner([dataset.indices[number] for number in numbers]))
    if type(dataset) is not TensorDataset or not all(map(_is_plain, dataset.tensors)):
        return None

    def selected(numbers: Sequence[int]) -> list[Tensor]:
        chosen = torch.tensor(numbers)
        return [each[chosen] for each in dataset.tensors]

    return selected


def _is_plain(tensor: Tensor) -> bool:
    strided = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return type(tensor) is Tensor and strided and not tensor.requires_grad


class RowBatches(Dataset[Any]):
    """A data set whose items are whole batches; their indices are lists of sample numbers."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __getitem__(self, numbers: Sequence[int]) -> list[Tensor]:
        return self._rows(numbers)


def as_read(batch: Any) -> Any:
    """Collates nothing."""
    return batch
