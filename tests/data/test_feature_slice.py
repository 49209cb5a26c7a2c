from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from evener.data.feature_slice import columns_of, divide_columns
from evener.data.loader import Loader
from evener.data.sampler import Order
from evener.errors import ConfigurationError, DataError, ShareError

VALUES = torch.arange(60.0).view(12, 5)


class Items(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return {"wide": VALUES[index], "other": (VALUES[index, :2], None)}, index


class Labelled(Items):
    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return {**inputs, "labels": target}


class AtOnce(Items):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError("items are read one by one")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [Items()[index] for index in indices]


class Gathered(AtOnce):
    def gather_batch(self, samples: torch.Tensor) -> Any:
        return {"wide": VALUES[samples], "other": (VALUES[samples, :2], None)}, samples


class Stream(IterableDataset[Any]):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return (Items()[index] for index in range(12))


class Own(Items):
    def __init__(self, start: int = 0, stop: int = 5) -> None:
        self.start, self.stop = start, stop

    def columns(self, start: int, stop: int) -> Own:
        return Own(start, stop)


@given(st.integers(1, 50), st.lists(st.floats(0.1, 9), min_size=1, max_size=8))
def test_columns_are_divided_without_gaps_in_proportion(width: int, weights: list[float]) -> None:
    try:
        slices = divide_columns(width, weights)
    except ConfigurationError:
        assert any(width * weight / sum(weights) < 1 for weight in weights)
        return
    assert [column for columns in slices for column in columns] == list(range(width))
    for columns, weight in zip(slices, weights, strict=True):
        assert len(columns) >= 1
        assert abs(len(columns) - width * weight / sum(weights)) < 1 + 1e-9


def test_a_rank_without_a_column_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"2 features .* leave rank 2 of 3 without one; use at most 2 ranks"
    ):
        divide_columns(2, [1, 1, 1])
    with pytest.raises(ShareError):
        divide_columns(4, [1, -1])


@pytest.mark.parametrize("kind", [Items, Labelled, AtOnce, Gathered, Stream])
def test_each_way_of_reading_cuts_the_wide_input_alone(kind: type) -> None:
    order = None if kind is Stream else Order(12, shuffle=False)
    batches = list(Loader(columns_of(kind(), range(1, 4), 5), order, batch_size=5))
    inputs = [batch.micro_batches[0].inputs for batch in batches]
    assert torch.cat([tree["wide"] for tree in inputs]).equal(VALUES[:, 1:4])
    assert torch.cat([tree["other"][0] for tree in inputs]).equal(VALUES[:, :2])
    assert [i for batch in batches for i in batch.micro_batches[0].targets.tolist()] == list(range(12))


def test_a_dict_with_labels_stays_one_for_a_collate_function_of_the_users_own() -> None:
    (inputs, targets) = columns_of(Items(), range(1, 4), 5)[2]
    labelled = columns_of(Labelled(), range(1, 4), 5)[2]
    assert isinstance(labelled, dict)
    assert labelled.pop("labels") == targets == 2
    assert labelled["wide"].equal(inputs["wide"])


def test_two_tensors_are_cut_once_and_the_rest_is_let_go() -> None:
    cut = columns_of(TensorDataset(VALUES, torch.arange(12)), range(3, 5), 5)
    assert cut.tensors[0].equal(VALUES[:, 3:])
    assert cut.tensors[0].untyped_storage().nbytes() == 12 * 2 * 4


def test_a_data_set_that_reads_its_columns_is_asked_for_them() -> None:
    own = columns_of(Own(), range(2, 4), 5)
    assert (type(own), own.start, own.stop) == (Own, 2, 4)


def test_a_stream_is_told_its_epoch() -> None:
    source = Stream()
    list(Loader(columns_of(source, range(1), 5), None, batch_size=5, epochs=3))
    assert source.epoch == 2


def test_no_input_of_that_width_is_an_error_that_tells_the_shapes() -> None:
    with pytest.raises(
        DataError, match=r"shapes \(5,\), \(2,\), a NoneType, has the 9 features .* columns\(start, stop\)"
    ):
        next(Loader(columns_of(Items(), range(3), 9), None, batch_size=5))


def test_an_item_that_is_no_pair_is_refused_as_ever() -> None:
    with pytest.raises(DataError, match="not a pair"):
        next(Loader(columns_of(TensorDataset(VALUES), range(3), 5), None, batch_size=5))
