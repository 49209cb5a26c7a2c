from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from evener.data import local_shards as parts_module
from evener.data.batch import Batch
from evener.data.loader import Loader
from evener.data.local_shards import LocalShards, gather_parts
from evener.errors import ConfigurationError

SIZES = st.lists(st.integers(0, 15), min_size=1, max_size=7).filter(any).map(tuple)


@given(SIZES)
def test_the_epoch_is_the_merge_of_evenly_dealt_parts(sizes: tuple[int, ...]) -> None:
    parts = LocalShards(sizes, 0)
    owners = [
        rank for _, rank in sorted((Fraction(2 * k + 1, n), r) for r, n in enumerate(sizes) for k in range(n))
    ]
    for position in range(parts.size + 1):
        assert list(parts.before(position)) == [owners[:position].count(rank) for rank in range(len(sizes))]


@given(SIZES, st.integers(1, 20))
def test_shares_use_each_sample_once_and_end_all_parts_together(
    sizes: tuple[int, ...], batch_size: int
) -> None:
    parts = LocalShards(sizes, 0)
    rows = [parts.shares(start, stop) for start, stop in parts.whole.batches(batch_size)]
    assert all(share >= 0 for row in rows for share in row)
    assert [sum(row) for row in rows[:-1]] == [batch_size] * (len(rows) - 1)
    assert tuple(map(sum, zip(*rows, strict=True))) == sizes
    for position in range(parts.size + 1):
        used = [Fraction(n, size) for n, size in zip(parts.before(position), sizes, strict=True) if size]
        allowed = Fraction(1, min(size for size in sizes if size))
        assert max(used) - min(used) <= 2 * allowed


def test_a_position_far_into_large_parts_is_found_at_once() -> None:
    parts = LocalShards((10**9, 3 * 10**9, 7), 0)
    half = parts.before(2 * 10**9)
    assert sum(half) == 2 * 10**9
    assert max(abs(n - size / 2) for n, size in zip(half, parts.sizes, strict=True)) <= 2
    assert parts.before(parts.size) == parts.sizes


def test_the_drawing_of_the_module() -> None:
    rows = re.search(r"rank +([\d ]+)\n", str(parts_module.__doc__))
    assert rows is not None
    parts = LocalShards((4, 2), 0)
    owners = [parts.shares(position, position + 1).index(1) for position in range(6)]
    assert [int(number) for number in rows[1].split()] == owners


class Numbers(Dataset[Any]):
    """This rank's part: sample ``i`` of ``size`` is ``(first + i, rank)``."""

    def __init__(self, rank: int, first: int, size: int) -> None:
        self.rank, self.first, self.size = rank, first, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        assert 0 <= index < self.size
        return float(self.first + index), self.rank


def owned(sizes: Sequence[int]) -> list[tuple[Any, LocalShards]]:
    """What every rank reads, and whose answers it would gather: first the sizes, then the item that is lent."""
    datasets = [Numbers(rank, sum(sizes[:rank]), size) for rank, size in enumerate(sizes)]
    lent = [dataset[0] if dataset.size else None for dataset in datasets]
    return [
        gather_parts(dataset, rank, answering(list(sizes), lent), "set")
        for rank, dataset in enumerate(datasets)
    ]


def answering(*answers: list[Any]) -> Callable[[Any], list[Any]]:
    """Gathers these, whatever this rank says."""
    remaining = iter(answers)
    return lambda value: next(remaining)


def all_ranks(sizes: Sequence[int], seed: int | None = 3, **options: Any) -> list[list[Batch]]:
    """For each global batch what every rank was handed."""
    columns = []
    for rank, (dataset, parts) in enumerate(owned(sizes)):
        order = None if seed is None else parts.order(seed)
        place = {"rank": rank, "world_size": len(sizes), "parts": parts}
        with Loader(dataset, order, **place, **options) as loader:
            columns.append(list(loader))
            assert loader.steps == len(columns[-1])
    return [list(row) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize("sizes", [(20, 7, 13), (0, 5, 30), (40, 0, 0), (1, 1, 1), (3,)])
@pytest.mark.parametrize("options", [{"batch_size": 8}, {"batch_size": 9, "micro_batch": 4}], ids=str)
def test_every_rank_reads_its_own_part_once_an_epoch(sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    rows = all_ranks(sizes, epochs=2, **options)
    for epoch in range(2):
        batches = [row for row in rows if row[0].epoch == epoch]
        assert [row[0].size for row in batches[:-1]] == [options["batch_size"]] * (len(batches) - 1)
        assert [row[0].last for row in batches] == [False] * (len(batches) - 1) + [True]
        seen: list[int] = []
        for row in batches:
            for rank, batch in enumerate(row):
                assert len(batch.micro_batches) == len(row[0].micro_batches)
                for micro in batch.micro_batches:
                    if micro.weight:
                        assert micro.targets.tolist() == [rank] * len(micro.samples)
                        assert micro.inputs.tolist() == micro.samples.tolist()
                        seen += micro.samples.tolist()
                assert sum(micro.size for micro in batch.micro_batches) == batch.shares[rank]
        assert sorted(seen) == list(range(sum(sizes)))


def test_epochs_and_parts_of_one_size_are_shuffled_differently() -> None:
    rows = all_ranks((16, 16), epochs=2, batch_size=32)
    orders = [(batch.micro_batches[0].samples % 16).tolist() for row in rows for batch in row]
    assert len({tuple(order) for order in orders}) == 4


def test_without_an_order_the_parts_are_read_as_they_stand() -> None:
    rows = all_ranks((5, 3), seed=None, batch_size=4)
    assert [i for row in rows for i in row[1].micro_batches[0].samples.tolist()] == [5, 6, 7]


def told(batch: Batch) -> Any:
    return batch.epoch, batch.index, batch.shares, batch.last, batch.micro_batches[0].samples.tolist()


@pytest.mark.parametrize("position", [0, 8, 24, 40])
def test_a_start_in_the_middle_goes_on_where_the_epoch_stood(position: int) -> None:
    whole = all_ranks((20, 7, 13), epochs=2, batch_size=8)
    rest = all_ranks((20, 7, 13), epochs=2, batch_size=8, start=(0, position))
    assert [list(map(told, row)) for row in rest] == [list(map(told, row)) for row in whole[position // 8 :]]


def read_values(workers: int) -> list[list[Any]]:
    rows = all_ranks((9, 4), batch_size=5, workers=workers)
    return [[batch.micro_batches[0].inputs.tolist() for batch in row] for row in rows]


def test_workers_read_the_same() -> None:
    assert read_values(0) == read_values(2)


def test_a_rank_without_samples_gets_one_of_another_rank_to_run_its_modules_on() -> None:
    for row in all_ranks((0, 5), batch_size=2):
        (micro,) = row[0].micro_batches
        assert (micro.weight, micro.size, micro.inputs.tolist()) == (0, 0, [0.0])


def test_a_tensor_data_set_is_lent_too() -> None:
    lender = TensorDataset(torch.arange(3.0), torch.arange(3))
    empty = TensorDataset(torch.zeros(0), torch.zeros(0))
    lent, parts = gather_parts(empty, 1, answering([3, 0], [lender[0], None]), "training set")
    (batch,) = Loader(lent, parts.order(0), batch_size=3, rank=1, world_size=2, parts=parts)
    assert batch.micro_batches[0].inputs.tolist() == [0.0]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_parts_without_any_sample_or_without_a_length_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="training set is empty on each of the 2 ranks"):
        gather_parts(Numbers(0, 0, 0), 0, lambda value: [0, 0], "training set")
    with pytest.raises(
        ConfigurationError, match=r"training set of rank 1 is an iterable dataset.*shard\(index, count\)"
    ):
        gather_parts(Stream(), 1, lambda value: [4, value], "training set")


def test_a_position_beyond_the_parts_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="position 9 is not within the 8 samples"):
        all_ranks((5, 3), batch_size=4, start=(0, 9))
