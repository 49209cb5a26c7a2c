from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from evener.data.batch import Batch
from evener.data.division import by_weights
from evener.data.fingerprint import fingerprint
from evener.data.loader import Loader
from evener.data.sharded import ShardedDataset
from evener.errors import ConfigurationError, DataError

LENGTHS = (7, 0, 12, 3, 9)
TOTAL = sum(LENGTHS)


class Opener:
    """Shard ``s`` yields ``100 s, 100 s + 1, ...``. Notes what it opened and yielded."""

    def __init__(self, lengths: Any = LENGTHS, fails: tuple[int, int] | None = None) -> None:
        self.lengths, self.fails = lengths, fails
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.yielded = 0

    def __call__(self, shard: int) -> Iterator[float]:
        self.opened.append(shard)
        try:
            for number in range(self.lengths[shard]):
                if (shard, number) == self.fails:
                    raise OSError("a torn file")
                self.yielded += 1
                yield float(100 * shard + number)
        finally:
            self.closed.append(shard)


def pair(record: float) -> tuple[float, int]:
    return record, int(record)


def dataset(opener: Any = None, **options: Any) -> ShardedDataset:
    given = {"decode": pair, "lengths": LENGTHS, "together": 2} | options
    return ShardedDataset(range(5), opener or Opener(), **given)


EVERYTHING = sorted(100.0 * shard + number for shard in range(5) for number in range(LENGTHS[shard]))


def values(batch: Batch) -> list[float]:
    return [x for part in batch.micro_batches if part.weight for x in part.inputs.tolist()]


def joined(batches: list[list[float]]) -> list[float]:
    return sorted(itertools.chain.from_iterable(batches))


def ranks_read(
    data: ShardedDataset, world_size: int, start: tuple[int, int], stop: int | None, seed: int, **options: Any
) -> tuple[list[list[float]], tuple[int, int]]:
    """Each rank's reading of ``stop`` batches, or all: what a batch has of all ranks, and the place after it."""

    def shares(step: int, size: int) -> list[int]:
        return by_weights(size, np.random.default_rng(seed + step).random(world_size).tolist())

    batches: list[list[float]] = []
    place = start
    loaders = [
        Loader(
            pickle.loads(pickle.dumps(data)),
            data.global_order(seed),
            batch_size=6,
            rank=rank,
            world_size=world_size,
            shares=shares,
            start=start,
            **options,
        )
        for rank in range(world_size)
    ]
    for parts in itertools.islice(zip(*loaders, strict=True), stop):
        batches.append(sorted(x for part in parts for x in values(part)))
        first = parts[0]
        place = (first.epoch + 1, 0) if first.last else (first.epoch, first.position + first.size)
    for loader in loaders:
        loader.close()
    return batches, place


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=4),
    st.integers(0, 50),
    st.integers(0, 5),
    st.integers(1, 3),
    st.sampled_from([None, 2]),
)
def test_each_sample_counts_once_however_often_the_ranks_change(
    parts: list[tuple[int, int]], seed: int, window: int, last_ranks: int, micro_batch: int | None
) -> None:
    data, place = dataset(window=window), (0, 0)
    seen: list[list[float]] = []
    for world_size, stop in parts:
        found, place = ranks_read(data, world_size, place, stop, seed, epochs=2, micro_batch=micro_batch)
        seen += found
    found, place = ranks_read(data, last_ranks, place, None, seed, epochs=2, micro_batch=micro_batch)
    seen += found
    assert place == (2, 0)
    assert seen == ranks_read(data, 1, (0, 0), None, seed, epochs=2)[0]
    per_epoch = -(-TOTAL // 6)
    for epoch in (0, 1):
        assert joined(seen[epoch * per_epoch : (epoch + 1) * per_epoch]) == EVERYTHING


def test_workers_read_the_same() -> None:
    data = dataset(window=3)
    alone, _ = ranks_read(data, 1, (0, 0), None, 5, epochs=1)
    first, place = ranks_read(data, 2, (0, 0), 2, 5, epochs=1, workers=2)
    second, _ = ranks_read(data, 3, place, None, 5, epochs=1, workers=2)
    assert first + second == alone


def test_a_shard_is_opened_once_an_epoch_and_closed() -> None:
    opener = Opener()
    data = dataset(opener)
    read = list(Loader(data, data.global_order(0), batch_size=4))
    assert sorted(x for batch in read for x in values(batch)) == EVERYTHING
    assert sorted(opener.opened) == [0, 2, 3, 4]
    assert opener.yielded == TOTAL


def test_a_resume_does_not_read_from_the_beginning() -> None:
    opener = Opener()
    data = dataset(opener, together=1)
    next(Loader(data, data.global_order(0), batch_size=1, start=(0, TOTAL - 1)))
    last = int(data.global_order(0).ids(0, TOTAL - 1, TOTAL)[0])
    assert opener.opened == [data.place(last)[0]]


def test_ranks_with_many_shards_decode_their_own_and_open_few() -> None:
    openers = [Opener((40,) * 8) for _ in range(2)]
    decoded: list[list[float]] = [[], []]
    for rank in (0, 1):

        def decode(record: float, rank: int = rank) -> tuple[float, int]:
            decoded[rank].append(record)
            return pair(record)

        data = ShardedDataset(range(8), openers[rank], decode=decode, lengths=[40] * 8, together=8)
        list(Loader(data, data.global_order(0), batch_size=16, rank=rank, world_size=2))
    assert not set(decoded[0]) & set(decoded[1])
    assert [len(each) for each in decoded] == [160, 160]
    assert [len(opener.opened) for opener in openers] == [4, 4]
    assert [opener.yielded for opener in openers] == [160, 160]


def test_a_table_is_read_by_number() -> None:
    class Table(list[float]):
        def __iter__(self) -> Iterator[float]:
            raise AssertionError("read one after the other")

    data = ShardedDataset(["a", "b"], lambda key: Table(range(5)), decode=pair)
    assert len(data) == 10
    assert data[7] == (2.0, 2)
    assert data[1] == (1.0, 1)


def test_workers_do_not_share_the_position_of_a_file_that_was_open_before(tmp_path: Path) -> None:
    """The file is longer than the buffer in which Python reads ahead."""
    path = tmp_path / "numbers"
    path.write_text("".join(f"{number}\n" for number in range(9000)))

    def lines(path: Path) -> Iterator[str]:
        with path.open() as file:
            yield from file

    data = ShardedDataset([path], lines, decode=lambda line: pair(float(line)))
    assert data[0] == (0.0, 0)
    batches = Loader(data, data.global_order(0), batch_size=500, workers=2, start_method="fork")
    assert [x for batch in batches for x in values(batch)] == list(map(float, range(9000)))


def test_an_earlier_sample_opens_the_shard_again() -> None:
    opener = Opener()
    data = dataset(opener)
    assert [data[8], data[8], data[7]] == [pair(201.0), pair(201.0), pair(200.0)]
    assert opener.opened == [2, 2]
    assert opener.closed == [2]


def test_lengths_are_counted_if_they_are_not_given() -> None:
    assert dataset(lengths=None).lengths == LENGTHS
    assert dataset(lengths=lambda shard: LENGTHS[shard]).lengths == LENGTHS


def test_a_fingerprint_reads_the_first_samples_of_shards() -> None:
    opener = Opener()
    assert sorted(fingerprint(dataset(opener))) == [0, 7, 19, 22]
    assert opener.yielded <= 8


def test_a_data_loader_draws_the_batches_of_an_epoch() -> None:
    data = dataset()
    loader = DataLoader(data, batch_sampler=data.batch_sampler(6), collate_fn=list)
    torch.manual_seed(3)
    first, second = ([[x for x, _ in batch] for batch in loader] for _ in range(2))
    assert len(loader) == len(first) == 6
    assert first != second
    assert joined(first) == joined(second) == EVERYTHING


# What goes wrong


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ([], "the list of shards is empty"),
        (["a", "b", "a"], "listed twice, so that their samples would count twice: a;"),
        ("file.txt", "shards is a str: give a list"),
        ({"a": 1}, "shards is a dict: give a list"),
        (itertools.cycle("ab"), "shards is a cycle: give a list"),
    ],
)
def test_wrong_lists_are_refused(shards: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ShardedDataset(shards, Opener())


@pytest.mark.parametrize("lengths", [[1, 2], [1, 2, 3, 4, -5], [1, 2, 3, 4, 2.5]])
def test_wrong_lengths_are_refused(lengths: list[Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"2 lengths|cannot have"):
        dataset(lengths=lengths)


def test_shards_without_any_sample_are_refused() -> None:
    data = dataset(lengths=[0] * 5)
    with pytest.raises(ConfigurationError, match="at least one sample"):
        data.global_order(0)


def test_an_endless_shard_is_not_counted_for_ever() -> None:
    with pytest.raises(
        DataError, match="shard a gave 1024 samples in 0 seconds of counting and has not ended"
    ):
        ShardedDataset(["a"], lambda key: itertools.count()).count(0, limit_seconds=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_opener_that_raises_is_named_with_shard_and_sample(workers: int) -> None:
    data = dataset(Opener(fails=(2, 5)))
    with pytest.raises(DataError, match=r"reading sample 5 of shard 2 failed: OSError: a torn file"):
        list(Loader(data, data.global_order(0), batch_size=4, workers=workers))
    with pytest.raises(DataError, match=r"counting sample 5 of shard 2 failed: OSError: a torn file"):
        len(dataset(Opener(fails=(2, 5)), lengths=None))


def test_an_opener_that_cannot_open_is_named() -> None:
    def closed(shard: int) -> Any:
        raise PermissionError("no")

    with pytest.raises(DataError, match="reading sample 0 of shard 0 failed: PermissionError: no"):
        dataset(closed)[3]


def test_a_sample_that_cannot_be_decoded_is_named() -> None:
    def decode(record: float) -> Any:
        if record == 203.0:
            raise ValueError("no picture")
        return pair(record)

    data = dataset(decode=decode)
    with pytest.raises(
        DataError, match=r"reading sample 10 \(sample 3 of shard 2\) of the training set failed"
    ):
        list(Loader(data, data.global_order(0), batch_size=4))
    batches = list(Loader(data, data.global_order(0), batch_size=4, skips=True))
    assert [one.sample for batch in batches for one in batch.skipped] == [10]
    assert sorted(x for batch in batches for x in values(batch)) == [x for x in EVERYTHING if x != 203.0]


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize(
    "opener", [Opener((7, 0, 20, 3, 9)), lambda shard: [float(shard)] * (7, 0, 20, 3, 9)[shard]]
)
def test_samples_that_were_not_counted_end_the_run_also_if_others_are_skipped(
    opener: Any, window: int
) -> None:
    data = dataset(opener, window=window)
    with pytest.raises(DataError, match=r"shard 2 has (more than 12|20) samples, and was counted"):
        list(Loader(data, data.global_order(0), batch_size=4, skips=True))


def test_a_skipped_sample_is_told_in_a_line() -> None:
    data = dataset(Opener(fails=(2, 11)))
    batches = list(Loader(data, data.global_order(0), batch_size=4, skips=True))
    (skipped,) = [one for batch in batches for one in batch.skipped]
    assert skipped.words.endswith("reading sample 11 of shard 2 failed: OSError: a torn file")


def test_samples_behind_a_torn_place_are_skipped_without_being_read_again() -> None:
    opener = Opener(fails=(2, 5))
    data = dataset(opener)
    batches = list(Loader(data, data.global_order(0), batch_size=4, skips=True))
    assert len([one for batch in batches for one in batch.skipped]) == 12 - 5
    assert sorted(x for batch in batches for x in values(batch)) == [
        x for x in EVERYTHING if not 205 <= x < 212
    ]
    assert opener.yielded < 3 * TOTAL


@pytest.mark.parametrize(
    ("actual", "words"), [(11, "ended after 11 samples"), (13, "has more than 12 samples")]
)
@pytest.mark.parametrize("table", [False, True])
def test_a_shard_that_has_changed_since_it_was_counted_is_named(actual: int, words: str, table: bool) -> None:
    opener = Opener((7, 0, actual, 3, 9))
    data = dataset((lambda shard: list(opener(shard))) if table else opener)
    words = f"has {actual} samples" if table else words
    with pytest.raises(DataError, match=f"shard 2 {words}, and was counted or said to have 12"):
        list(Loader(data, data.global_order(0), batch_size=4))


def test_lines_of_files(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text("".join(f"{name}{line}\n" for line in range(4)))
    data = ShardedDataset(sorted(tmp_path.iterdir()), open, decode=str.strip, together=3)
    assert len(data) == 12
    assert [data[index] for index in range(12)] == [f"{name}{line}" for name in "abc" for line in range(4)]
    assert data.describe_sample(5) == f"sample 1 of shard {tmp_path / 'b'}"
