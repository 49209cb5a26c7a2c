"""Samples that cannot be read are named, and left out where that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from evener.data.loader import Loader
from evener.data.sample_names import called
from evener.data.sampler import Order
from evener.errors import ConfigurationError, DataError, InterruptedRunError


class Bad(Dataset[Any]):
    """Ten samples, some of which cannot be read."""

    def __init__(self, *bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self.bad:
            raise OSError(f"{index} is torn")
        return torch.tensor([float(index)]), torch.tensor(index)


class Many(Bad):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Gathers(Bad):
    def gather_batch(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [self[index] for index in samples.tolist()]
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


class Named(Bad):
    def __init__(self, *bad: int) -> None:
        super().__init__(*bad)
        self.samples = [(Path(f"pictures/{n}.png"), n) for n in range(10)]


def batches(dataset: Any, rank: int = 0, world_size: int = 1, **options: Any) -> list[Any]:
    order = Order(len(dataset), shuffle=False)
    with Loader(dataset, order, batch_size=4, rank=rank, world_size=world_size, **options) as loader:
        return list(loader)


@pytest.mark.parametrize("kind", [Bad, Many, Gathers])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_sample_that_cannot_be_read_is_named(kind: type[Bad], workers: int) -> None:
    with pytest.raises(DataError, match=r"reading sample 6 of the training set failed: OSError: 6 is torn"):
        batches(kind(6), workers=workers)


@pytest.mark.parametrize(
    ("dataset", "index", "words"),
    [
        (Bad(), 3, "sample 3"),
        (Named(), 3, "sample 3 (pictures/3.png)"),
        (Subset(Named(), [9, 8, 7]), 1, "sample 1 (pictures/8.png)"),
        (ConcatDataset([Bad(), Subset(Named(), [4, 2])]), 11, "sample 11 (pictures/2.png)"),
        (ConcatDataset([Named(), Bad()]), 11, "sample 11"),
        (object(), 0, "sample 0"),
    ],
)
def test_what_a_sample_is_called(dataset: Any, index: int, words: str) -> None:
    assert called(dataset, index) == words


def test_a_dataset_may_say_itself_where_a_sample_comes_from() -> None:
    class Says(Named):
        def describe_sample(self, index: int) -> str:
            if index == 1:
                raise KeyError(index)
            return f"row {index} of table.csv"

    assert called(Subset(Says(), [5]), 0) == "sample 0 (row 5 of table.csv)"
    assert called(Says(), 1) == "sample 1"


@pytest.mark.parametrize("kind", [Bad, Many, Gathers])
@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_read_is_left_out(kind: type[Bad], workers: int) -> None:
    """Of a batch, half a batch and a whole one; the shares and positions stay."""
    found = batches(kind(1, 4, 5, 6, 7), workers=workers, skips=True)
    assert [batch.micro_batches[0].samples.tolist() for batch in found] == [[0, 2, 3], [8], [8, 9]]
    assert [batch.micro_batches[0].targets.tolist() for batch in found] == [[0, 2, 3], [8], [8, 9]]
    assert [batch.micro_batches[0].weight for batch in found] == [1, 0, 1]
    assert [(batch.position, batch.size, batch.shares) for batch in found] == [
        (0, 4, (4,)),
        (4, 4, (4,)),
        (8, 2, (2,)),
    ]
    assert [[skipped.sample for skipped in batch.skipped] for batch in found] == [[1], [4, 5, 6, 7], []]
    assert found[0].skipped[0].words == "sample 1 of the training set: OSError: 1 is torn"


def test_each_is_skipped_by_the_rank_whose_it_is() -> None:
    """A rank without samples runs the model on one of another, which may be torn as well."""
    found = [
        batches(Bad(8), rank, 3, skips=True, shares=lambda step, size: [size, 0, 0]) for rank in range(3)
    ]
    assert [[len(batch.skipped) for batch in of_rank] for of_rank in found] == [
        [0, 0, 1],
        [0, 0, 0],
        [0, 0, 0],
    ]
    assert [[batch.micro_batches[0].weight for batch in of_rank] for of_rank in found] == [
        [1, 1, 1],
        [0] * 3,
        [0] * 3,
    ]


def test_where_nothing_can_be_read_nothing_is_skipped() -> None:
    with pytest.raises(DataError, match="reading sample 0 of the training set"):
        batches(Bad(*range(10)), skips=True)


def test_a_wrong_item_is_no_torn_one() -> None:
    class Wrong(Bad):
        def __getitem__(self, index: int) -> Any:
            return index

    with pytest.raises(DataError, match="not a pair"):
        batches(Wrong(), skips=True)


def test_a_signal_is_no_torn_sample() -> None:
    class Interrupted(Bad):
        def __getitem__(self, index: int) -> Any:
            raise InterruptedRunError("stop", 2)

    with pytest.raises(InterruptedRunError):
        batches(Interrupted(), skips=True)


def test_a_stream_cannot_skip() -> None:
    class Items(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.zeros(1), torch.zeros(1))])

    with pytest.raises(ConfigurationError, match="an iterable data set ends with its first exception"):
        Loader(Items(), None, batch_size=1, skips=True)
