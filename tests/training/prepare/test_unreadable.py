"""A sample that cannot be read, in a loop of the user's own."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import evener
from evener.errors import DataError
from tests.training.prepare.running import with_settings

BAD = 9


class Files(Dataset[Any]):
    def __init__(self, error: Exception) -> None:
        self._error = error
        self.files = [f"{index}.png" for index in range(24)]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if index == BAD:
            raise self._error
        return torch.zeros(2)


def read(error: Exception, workers: int) -> None:
    model = torch.nn.Linear(2, 1)
    kind = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader: Any = DataLoader(Files(error), batch_size=8, **kind)
    with with_settings():
        for inputs in evener.prepare(model, loader)[1]:
            model(inputs)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_keeps_its_class_and_names_the_sample(workers: int) -> None:
    with pytest.raises(OSError, match="a torn file") as caught:
        read(OSError("a torn file"), workers)
    assert "failed while reading sample 9 (9.png)" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_iteration_does_not_end_a_pass_unseen(workers: int) -> None:
    with pytest.raises(DataError, match=r"reading sample 9 \(9.png\) raised StopIteration"):
        read(StopIteration(), workers)
