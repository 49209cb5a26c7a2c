from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from evener.data.batch import Batch
from evener.data.division import by_weights
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


class Drawing(Counting):
    """Draws its items."""

    def __iter__(self) -> Iterator[Any]:
        return ((torch.rand(()), index) for index in range(self.size))


class ShardedDrawing(Drawing):
    def shard(self, index: int, count: int) -> Any:
        return iter(self)


def values(batch: Batch) -> list[float]:
    return [x for part in batch.micro_batches if part.weight for x in part.inputs.tolist()]


def gather(local_size: int) -> list[int]:
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    sizes[dist.get_rank()] = local_size
    dist.all_reduce(sizes)
    return sizes.tolist()


def read(
    dataset: Any,
    shares: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
    **options: Any,
) -> list[Any]:
    """On a rank: ``(what Batch says, what counts, placeholders)`` of every batch."""
    draw: Callable[[int, int], Sequence[int]] | None = None if shares is None else lambda step, size: shares
    if weights is not None:
        draw = lambda step, size: by_weights(size, weights)  # noqa: E731
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


def test_ranks_take_their_shares_of_batches_in_the_order_of_the_stream(
    ranks: Callable[[int], RankPool],
) -> None:
    first, second = ranks(2).run(read, Counting(10), batch_size=4, weights=[1, 3])
    assert [batch[0] for batch in first] == [batch[0] for batch in second]
    assert [batch[0] for batch in first] == [
        (0, 0, 0, 4, (1, 3), False),
        (0, 1, 4, 4, (1, 3), False),
        (0, 2, 8, 2, (1, 1), True),
    ]
    assert [batch[1] for batch in first] == [[0.0], [4.0], [8.0]]
    assert [batch[1] for batch in second] == [[1.0, 2.0, 3.0], [5.0, 6.0, 7.0], [9.0]]


def test_ranks_read_each_part_once_and_agree_on_every_batch(ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(read, Sharded(11), batch_size=4, shares=[1, 3])
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


def test_a_rank_with_share_zero_gets_a_placeholder(ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(read, Counting(4), batch_size=2, shares=[2, 0])
    assert [batch[1] for batch in first] == [[0.0, 1.0], [2.0, 3.0]]
    assert [batch[1:] for batch in second] == [([], [[0.0]]), ([], [[2.0]])]
    first, second = ranks(2).run(read, Sharded(6), batch_size=2, shares=[2, 0])
    assert [batch[1] for batch in first] == [[0.0, 2.0], [4.0]]
    assert [batch[1:] for batch in second] == [([], [[1.0]])] * 2


def test_a_rank_without_any_sample_is_named_on_every_rank(ranks: Callable[[int], RankPool]) -> None:
    for message in ranks(2).run(read_failing, Sharded(1)):
        assert "gave no sample at all to rank 1 of 2" in message


class OfRank(Counting):
    """A stream that is not the same on all ranks."""

    def __init__(self, sizes: Sequence[int], step: int = 1) -> None:
        super().__init__(0)
        self.sizes, self.step = sizes, step

    def __iter__(self) -> Iterator[Any]:
        rank = dist.get_rank()
        return ((float(index + rank * (self.step - 1)), 0) for index in range(self.sizes[rank]))


def test_streams_with_other_ends_are_told_on_every_rank(ranks: Callable[[int], RankPool]) -> None:
    for message in ranks(2).run(read_failing, OfRank([6, 5])):
        assert "at sample 4 the ranks have 2, 1 more" in message


def read_warned(dataset: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read(dataset, batch_size=2)
    return [str(warning.message) for warning in caught]


def test_a_stream_that_divides_itself_by_rank_is_noticed(ranks: Callable[[int], RankPool]) -> None:
    """Whoever reads it: a run, an evaluation, or an engine that nobody observes."""
    assert ranks(2).run(read_warned, OfRank([6, 6])) == [[], []]
    told, nothing = ranks(2).run(read_warned, OfRank([6, 6], step=2))
    assert "the first sample of the training set is not the same on all ranks" in told[0]
    assert not nothing


def test_an_empty_stream_and_one_that_is_iterated_once_are_told() -> None:
    class Once(Counting):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.items = super().__iter__()

        def __iter__(self) -> Iterator[Any]:
            return self.items

    for dataset in (Counting(0), Once(3)):
        with pytest.raises(DataError, match="is empty, or can be iterated only once"):
            list(Loader(dataset, None, batch_size=2, epochs=2))


def test_a_shard_method_of_another_form_is_not_called() -> None:
    class Other(Counting):
        def shard(self, num_shards: int, index: int) -> Any:
            raise AssertionError("called")

    assert [values(batch) for batch in Loader(Other(3), None, batch_size=2)] == [[0.0, 1.0], [2.0]]


def test_micro_batches_are_global() -> None:
    batches = list(Loader(Counting(10), None, batch_size=8, micro_batch=3))
    assert [[part.size for part in batch.micro_batches] for batch in batches] == [[3, 3, 2], [2]]
    assert [part.samples.tolist() for part in batches[1].micro_batches] == [[8, 9]]


def test_a_resume_without_a_state_skips() -> None:
    batches = list(Loader(Counting(10), None, batch_size=4, epochs=2, start=(1, 4)))
    assert [(b.epoch, b.index, b.position, values(b)) for b in batches] == [
        (1, 1, 4, [4, 5, 6, 7]),
        (1, 2, 8, [8, 9]),
    ]


@pytest.mark.parametrize("kind", [Drawing, ShardedDrawing])
def test_workers_draw_other_numbers_in_each_epoch_and_the_same_when_it_is_read_again(kind: Any) -> None:
    def drawn(start: tuple[int, int]) -> list[list[float]]:
        with Loader(
            kind(4), None, batch_size=4, workers=1, start_method="fork", epochs=3, start=start
        ) as loader:
            return [values(batch) for batch in loader]

    epochs = drawn((0, 0))
    assert len({number for epoch in epochs for number in epoch}) == 12
    assert drawn((1, 0)) == epochs[1:]
    assert drawn((1, 2)) == [epochs[1][2:], epochs[2]]


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
