from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from evener.data.batch import Batch
from evener.data.loader import Loader
from evener.errors import ConfigurationError, DataError
from tests.ranks import RankPool


class Counting(IterableDataset[Any]):
    """``(float(i), epoch)`` for ``i`` below ``size``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return ((float(index), self.epoch) for index in range(self.size))


class Sharded(Counting):
    def shard(self, index: int, count: int) -> Any:
        return ((float(i), self.epoch) for i in range(index, self.size, count))


class DividedAmongWorkers(Counting):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        return ((float(index), self.epoch) for index in range(start, self.size, step))


class Failing(Counting):
    def __iter__(self) -> Iterator[Any]:
        yield 0.0, 0
        raise OSError("the disk is gone")


def values(batch: Batch) -> list[float]:
    return [x for part in batch.micro_batches if part.weight for x in part.inputs.tolist()]


def gather(local_size: int) -> list[int]:
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    sizes[dist.get_rank()] = local_size
    dist.all_reduce(sizes)
    return sizes.tolist()


def read(dataset: Any, shares: Sequence[int] | None = None, **options: Any) -> list[Any]:
    """On a rank: ``(what Batch says, what counts, placeholders)`` of every batch."""
    draw: Callable[[int, int], Sequence[int]] | None = None if shares is None else lambda step, size: shares
    with Loader(
        dataset,
        None,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        shares=draw,
        agree=gather,
        **options,
    ) as loader:
        return [
            (
                (b.epoch, b.index, b.position, b.size, b.shares, b.last),
                values(b),
                [part.inputs.tolist() for part in b.micro_batches if part.weight == 0],
            )
            for b in loader
        ]


def read_failing(dataset: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(dataset, batch_size=2)
    return str(caught.value)


@pytest.mark.parametrize("kind", [Counting, Sharded, DividedAmongWorkers])
@pytest.mark.parametrize("workers", [0, 2])
def test_one_rank_reads_all_of_every_epoch(kind: Any, workers: int) -> None:
    batches = list(Loader(kind(40), None, batch_size=16, epochs=2, workers=workers))
    assert [batch.size for batch in batches] == [16, 16, 8] * 2
    assert [batch.last for batch in batches] == [False, False, True] * 2
    for epoch in range(2):
        assert sorted(x for batch in batches[3 * epoch : 3 * epoch + 3] for x in values(batch)) == list(
            range(40)
        )
        assert batches[3 * epoch].micro_batches[0].targets.tolist() == [epoch] * 16


@pytest.mark.parametrize("kind", [Counting, Sharded])
def test_ranks_read_each_sample_once_and_agree_on_every_batch(
    ranks: Callable[[int], RankPool], kind: Any
) -> None:
    first, second = ranks(2).run(read, kind(11), batch_size=4, shares=[1, 3])
    assert [batch[0] for batch in first] == [batch[0] for batch in second]
    assert sorted(x for batches in (first, second) for batch in batches for x in batch[1]) == list(range(11))
    assert [batch[0] for batch in first] == [
        (0, 0, 0, 4, (1, 3), False),
        (0, 1, 4, 3, (1, 2), False),
        (0, 1, 7, 1, (1, 0), False),
        (0, 2, 8, 1, (1, 0), False),
        (0, 2, 9, 1, (1, 0), False),
        (0, 2, 10, 1, (1, 0), True),
    ]
    assert second[2][2] == second[5][2] == [[9.0]]


def test_a_rank_with_share_zero_gets_its_next_sample_as_placeholder(ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(read, Counting(6), batch_size=2, shares=[2, 0])
    assert [batch[1] for batch in first] == [[0.0, 2.0], [4.0]]
    assert [batch[1:] for batch in second] == [([], [[1.0]])] * 2


def test_a_rank_without_any_sample_is_named_on_every_rank(ranks: Callable[[int], RankPool]) -> None:
    for message in ranks(2).run(read_failing, Counting(1)):
        assert "gave no sample at all to rank 1 of 2" in message


def test_micro_batches_are_global() -> None:
    batches = list(Loader(Counting(10), None, batch_size=8, micro_batch=3))
    assert [[part.size for part in batch.micro_batches] for batch in batches] == [[3, 3, 2], [2]]
    assert [part.samples.tolist() for part in batches[1].micro_batches] == [[8, 9]]


def test_a_resume_skips() -> None:
    batches = list(Loader(Counting(10), None, batch_size=4, epochs=2, start=(1, 4)))
    assert [(b.epoch, b.index, b.position, values(b)) for b in batches] == [
        (1, 1, 4, [4, 5, 6, 7]),
        (1, 2, 8, [8, 9]),
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failing_stream_is_explained(workers: int) -> None:
    with pytest.raises(
        DataError, match="reading the training set on rank 0 failed: OSError: the disk is gone"
    ):
        list(Loader(Failing(4), None, batch_size=1, workers=workers))


def test_an_item_that_is_no_pair_is_named() -> None:
    class Single(Counting):
        def __iter__(self) -> Iterator[Any]:
            return iter([1, 2])

    with pytest.raises(DataError, match="sample 0 of the training set is an int, not a pair"):
        next(Loader(Single(2), None, batch_size=2))


def test_several_ranks_need_a_way_to_agree() -> None:
    with pytest.raises(ConfigurationError, match="needs agree="):
        Loader(Counting(4), None, batch_size=2, world_size=2)


def test_steps_are_unknown_and_one_batch_is_read_ahead() -> None:
    loader = Loader(Counting(4), None, batch_size=2)
    assert loader.steps is None
    assert loader.lookahead == 1
