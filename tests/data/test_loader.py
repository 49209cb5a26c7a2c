from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from evener.data.batch import Batch
from evener.data.division import by_weights
from evener.data.loader import Loader
from evener.data.sampler import Order
from evener.errors import ConfigurationError, DataError, InterruptedRunError, ShareError

Ids = list[int]


class Numbers(Dataset[Any]):
    """Sample ``i`` is ``(float(i), 2 * i)``."""

    def __init__(self, size: int, bad: Callable[[int], Any] | None = None) -> None:
        self.size = size
        self.bad = bad

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.bad(index) if self.bad else (float(index), 2 * index)


class NumbersAtOnce(Numbers):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError("items are read one by one")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(float(index), 2 * index) for index in indices]


class NumbersGathered(Numbers):
    def gather_batch(self, samples: torch.Tensor) -> Any:
        return samples.double(), 2 * samples


def tensors(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size).double(), 2 * torch.arange(size))


def no_pair(index: int) -> Any:
    return index


def failing(index: int) -> Any:
    raise KeyError(f"no file {index}")


def dying(index: int) -> Any:
    os._exit(3)


def drawing(index: int) -> Any:
    return torch.rand(()), random.random() + np.random.rand()


def random_shares(world_size: int) -> Callable[[int, int], Ids]:
    """Any shares, but the same on every rank."""

    def shares(step: int, size: int) -> Ids:
        return by_weights(size, np.random.default_rng(step).random(world_size).tolist())

    return shares


def counted(batch: Batch) -> Ids:
    return [i for part in batch.micro_batches if part.weight for i in part.samples.tolist()]


def all_ranks(world_size: int, dataset: Any, order: Order | None, **options: Any) -> list[list[Batch]]:
    """For each global batch what every rank was handed."""
    columns = []
    for rank in range(world_size):
        with Loader(dataset, order, rank=rank, world_size=world_size, **options) as loader:
            columns.append(list(loader))
    return [list(row) for row in zip(*columns, strict=True)]


def micro_batch_sets(rows: Iterable[list[Batch]]) -> list[list[Ids]]:
    """For each global batch the ids of each micro-batch, over all ranks in order of position."""
    return [
        [
            [i for part in parts if part.weight for i in part.samples.tolist()]
            for parts in zip(*(batch.micro_batches for batch in row), strict=True)
        ]
        for row in rows
    ]


@pytest.mark.parametrize("kind", [Numbers, NumbersAtOnce, NumbersGathered, tensors])
def test_each_way_of_reading_gives_the_same(kind: Callable[[int], Any]) -> None:
    order = Order(20, seed=1)
    batches = list(Loader(kind(20), order, batch_size=8, epochs=1))
    assert [counted(batch) for batch in batches] == [order.ids(0, a, b).tolist() for a, b in order.batches(8)]
    for batch in batches:
        (part,) = batch.micro_batches
        assert part.inputs.dtype == torch.float64
        assert part.inputs.tolist() == part.samples.tolist()
        assert part.targets.tolist() == (2 * part.samples).tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_batches_do_not_depend_on_ranks_and_shares(workers: int) -> None:
    options = {"batch_size": 7, "micro_batch": 3, "epochs": 2}
    alone = micro_batch_sets(all_ranks(1, tensors(23), Order(23, seed=1), **options))
    rows = all_ranks(3, tensors(23), Order(23, seed=1), shares=random_shares(3), workers=workers, **options)
    assert micro_batch_sets(rows) == alone
    assert [len(batch) for batch in alone] == [3, 3, 3, 1] * 2
    shares = random_shares(3)
    for step, row in enumerate(rows):
        for rank, batch in enumerate(row):
            assert list(batch.shares) == shares(step, batch.size)
            assert len(counted(batch)) == batch.shares[rank]
            assert sum(part.size for part in batch.micro_batches) == batch.shares[rank]
            for part in batch.micro_batches:
                assert part.inputs.tolist() == part.samples.tolist()


def test_what_a_batch_says_of_itself() -> None:
    batches = list(Loader(tensors(10), Order(10), batch_size=4, epochs=2))
    assert [(b.epoch, b.index, b.position, b.size, b.last) for b in batches] == [
        (epoch, index, 4 * index, 2 if index == 2 else 4, index == 2)
        for epoch in range(2)
        for index in range(3)
    ]


def test_a_rank_with_nothing_gets_a_real_sample_that_does_not_count() -> None:
    for row in all_ranks(4, tensors(9), Order(9, seed=2), batch_size=7):
        first = counted(row[0])[0]
        for rank, batch in enumerate(row):
            (part,) = batch.micro_batches
            if batch.shares[rank] == 0:
                assert part.weight == part.size == 0
                assert part.samples.tolist() == part.inputs.tolist() == [first]
    assert row[0].shares == (1, 1, 0, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_start_in_mid_epoch_continues_there(workers: int) -> None:
    options = {"batch_size": 4, "epochs": 3, "workers": workers}
    whole = [counted(batch) for batch in Loader(tensors(10), Order(10, seed=3), **options)]
    loader = Loader(tensors(10), Order(10, seed=3), start=(1, 4), **options)
    batches = list(loader)
    assert [counted(batch) for batch in batches] == whole[4:]
    assert loader.steps == len(batches)
    assert (batches[0].epoch, batches[0].index, batches[0].position) == (1, 1, 4)


@pytest.mark.parametrize(("workers", "lookahead"), [(0, 0), (1, 2), (2, 4)])
def test_shares_are_asked_once_in_order_and_never_beyond_the_lookahead(workers: int, lookahead: int) -> None:
    asked: list[tuple[int, int]] = []

    def shares(step: int, size: int) -> Ids:
        asked.append((step, size))
        return [size]

    loader = Loader(tensors(38), Order(38), batch_size=4, shares=shares, workers=workers, first_step=5)
    assert loader.lookahead == lookahead
    seen = 0
    for step, _ in enumerate(loader):
        assert len(asked) <= step + 1 + lookahead
        seen = max(seen, len(asked) - step - 1)
    assert seen == lookahead
    assert asked == [(5 + i, 4) for i in range(9)] + [(14, 2)]


@pytest.mark.parametrize(
    ("shares", "message"),
    [([2, 1], "add up to 3, not to the 4"), ([5, -1], "negative -1 on rank 1"), ([4], "are 1 for 2 ranks")],
)
def test_shares_that_do_not_divide_a_batch_are_refused(shares: Ids, message: str) -> None:
    loader = Loader(tensors(8), Order(8), batch_size=4, world_size=2, shares=lambda step, size: shares)
    with pytest.raises(ShareError, match=message):
        next(loader)


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (8, {"batch_size": 0}, "batch size must be at least 1, not 0"),
        (8, {"batch_size": -3}, "not -3"),
        (8, {"batch_size": 4, "micro_batch": 0}, "micro-batch size must be at least 1, not 0"),
        (8, {"batch_size": 4, "workers": -1}, "-1 workers"),
        (8, {"batch_size": 4, "prefetch_factor": 0}, "prefetch_factor"),
        (8, {"batch_size": 4, "rank": 2, "world_size": 2}, "rank 2 is not one of 2"),
        (8, {"batch_size": 4, "start": (0, 9)}, "position 9"),
        (0, {"batch_size": 4}, "the training set is empty"),
    ],
)
def test_values_that_cannot_work_are_refused_at_once(size: int, options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Loader(tensors(size), None, **options)


def test_an_order_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has 8 samples, but its order is one of 9"):
        Loader(tensors(8), Order(9), batch_size=4)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_item_that_is_no_pair_is_named(workers: int) -> None:
    loader = Loader(Numbers(8, no_pair), None, batch_size=4, workers=workers)
    with pytest.raises(DataError, match=r"^sample 0 of the training set is an int, not a pair"):
        next(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failing_data_set_is_shown_with_its_traceback(workers: int) -> None:
    loader = Loader(Numbers(8, failing), None, batch_size=4, workers=workers, name="evaluation set")
    with pytest.raises(DataError) as caught:
        next(loader)
    text = str(caught.value)
    assert text.startswith("reading sample 0 of the evaluation set failed: KeyError: 'no file 0'\n")
    assert "in failing" in text


def test_a_worker_that_dies_is_explained() -> None:
    loader = Loader(Numbers(8, dying), None, batch_size=4, workers=1)
    with pytest.raises(DataError, match=r"ended with status 3.*with 0 workers"):
        next(loader)


def test_the_users_collate_gets_the_items() -> None:
    def collate(items: list[Any]) -> Any:
        return {"sum": sum(x for x, _ in items)}, len(items)

    batch = next(Loader(tensors(8), None, batch_size=4, collate=collate))
    assert batch.micro_batches[0].inputs == {"sum": 6}
    assert batch.micro_batches[0].targets == 4


def drawn_numbers(**options: Any) -> list[Any]:
    with Loader(Numbers(8, drawing), None, batch_size=4, workers=1, **options) as loader:
        parts = [batch.micro_batches[0] for batch in loader]
    return [(part.inputs.tolist(), part.targets.tolist()) for part in parts]


def test_random_numbers_of_workers_follow_the_seed_and_the_rank() -> None:
    first = drawn_numbers(seed=1)
    assert drawn_numbers(seed=1) == first
    assert drawn_numbers(seed=2) != first
    other = drawn_numbers(seed=1, rank=1, world_size=2, shares=lambda step, size: [0, size])
    assert other != first


def test_random_numbers_of_the_main_process_are_left_alone() -> None:
    before = torch.get_rng_state()
    list(Loader(tensors(8), Order(8), batch_size=4, workers=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_may_be_spawned() -> None:
    with Loader(tensors(8), Order(8), batch_size=4, workers=1, start_method="spawn") as loader:
        assert sorted(i for batch in loader for i in counted(batch)) == list(range(8))


def test_close_ends_the_workers_and_the_batches() -> None:
    others = set(multiprocessing.active_children())  # ranks that other tests use
    loader = Loader(tensors(80), Order(80), batch_size=4, workers=2)
    next(loader)
    assert len(set(multiprocessing.active_children()) - others) == 2
    loader.close()
    assert set(multiprocessing.active_children()) <= others
    assert list(loader) == []


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_reach_the_gpu_one_ahead_and_whole(workers: int) -> None:
    loader = Loader(tensors(1000), Order(1000), batch_size=64, device="cuda", workers=workers)
    assert loader.lookahead == 1 + 2 * workers
    for batch in loader:
        (part,) = batch.micro_batches
        assert part.inputs.is_cuda
        assert part.inputs.tolist() == part.samples.tolist()


class Interrupts(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise InterruptedRunError("stopped by SIGTERM", 15)


def test_a_signal_while_data_are_read_stays_what_it_is() -> None:
    with Loader(Interrupts(), None, batch_size=2) as loader, pytest.raises(InterruptedRunError):
        next(loader)
