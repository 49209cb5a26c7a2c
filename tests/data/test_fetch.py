from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from evener.data.fetch import Fetch, ReadFailure, first_inputs
from evener.errors import DataError


class OnGpu(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.ones(2).cuda(), 0


class Broken(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("CUDA is a word")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_data_set_that_asks_for_a_gpu_is_told_to_leave_it() -> None:
    found = Fetch(OnGpu(), None, "training set")[np.array([3])]
    assert isinstance(found, ReadFailure)
    assert "reading sample 3 of the training set failed: the data set asks for a device" in found.message
    assert "remove .cuda() and .to(device)" in found.message


def test_another_error_keeps_its_traceback() -> None:
    found = Fetch(Broken(), None, "training set")[np.array([3])]
    assert isinstance(found, ReadFailure)
    assert "RuntimeError: CUDA is a word\nTraceback" in found.message


def test_the_first_inputs_of_any_training_set() -> None:
    pairs = [(torch.tensor(float(number)), number) for number in range(5)]
    for dataset in (pairs, iter(pairs)):
        assert first_inputs(dataset, None, 3).tolist() == [0.0, 1.0, 2.0]
    assert first_inputs(pairs, None, 9).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert first_inputs(pairs, lambda items: (len(items), items), 2) == 2
    assert first_inputs([], None, 3) is None


def test_a_first_sample_that_cannot_be_read_is_named() -> None:
    class Torn(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise OSError("a torn file")

    with pytest.raises(DataError, match="reading sample 0 of the training set failed: OSError: a torn file"):
        first_inputs(Torn([0]), None, 3)
