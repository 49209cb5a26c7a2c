from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from evener.data.shard_counts import COUNTS, count_together
from evener.data.sharded import ShardedDataset
from evener.errors import ConfigurationError, DataError


class Meeting:
    """Gathers values of ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._values = threading.Barrier(ranks, timeout=20), [None] * ranks

    def gather_of(self, rank: int) -> Callable[[Any], Sequence[Any]]:
        def gather(value: Any) -> Sequence[Any]:
            self._values[rank] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return gather


def on_ranks(datasets: Sequence[Any], **options: Any) -> list[str]:
    """Counts a data set on each rank. Returns the message of each rank's error, or "" """
    meeting = Meeting(len(datasets))

    def count(rank: int) -> str:
        try:
            count_together({"training set": datasets[rank]}, rank, meeting.gather_of(rank), **options)
        except (DataError, ConfigurationError) as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(datasets)) as pool:
        return list(pool.map(count, range(len(datasets))))


class Lines:
    """Opens a file, and counts how often."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    def __call__(self, path: Path) -> Any:
        self.opened.append(path.name)
        yield from path.read_text().splitlines()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    for index in range(5):
        (tmp_path / f"shard{index}").write_text("x\n" * (index + 1))
    return sorted(tmp_path.glob("shard*"))


def test_each_rank_counts_a_part_and_knows_all(files: list[Path]) -> None:
    openers = [Lines(), Lines()]
    datasets = [ShardedDataset(files, opener) for opener in openers]
    assert on_ranks(datasets) == ["", ""]
    assert [dataset.lengths for dataset in datasets] == [(1, 2, 3, 4, 5)] * 2
    assert sorted(openers[0].opened + openers[1].opened) == [file.name for file in files]


def test_counts_are_kept_until_a_file_changes(files: list[Path], tmp_path: Path) -> None:
    kept = tmp_path / "run" / COUNTS
    assert on_ranks([ShardedDataset(files, Lines())] * 1, file=kept) == [""]
    opener = Lines()
    files[2].write_text("one\ntwo\n")
    datasets = [ShardedDataset(files, opener), ShardedDataset(files, opener)]
    assert on_ranks(datasets, file=kept) == ["", ""]
    assert opener.opened == ["shard2"]
    assert datasets[1].lengths == (1, 2, 2, 4, 5)


@pytest.mark.parametrize("text", ["{", "[]", '{"shard0": 3}', '{"shard0": [-1]}'])
def test_a_damaged_file_of_counts_is_counted_anew(files: list[Path], tmp_path: Path, text: str) -> None:
    kept = tmp_path / COUNTS
    kept.write_text(text.replace("shard0", str(files[0])))
    dataset = ShardedDataset(files, Lines())
    assert on_ranks([dataset], file=kept) == [""]
    assert dataset.lengths == (1, 2, 3, 4, 5)
    assert json.loads(kept.read_text())[str(files[1])][0] == 2


def test_a_shard_that_cannot_be_counted_is_named_on_all_ranks_and_the_rest_is_kept(
    files: list[Path], tmp_path: Path
) -> None:
    def opener(path: Path) -> Any:
        yield "first"
        if path.name == "shard3":
            raise OSError("a torn file")

    messages = on_ranks([ShardedDataset(files, opener) for _ in range(2)], file=tmp_path / COUNTS)
    assert all("rank 1: counting sample 1 of shard" in message for message in messages)
    assert len(json.loads((tmp_path / COUNTS).read_text())) == 3


def test_ranks_that_list_other_shards_are_told(files: list[Path]) -> None:
    datasets = [ShardedDataset(files, Lines()), ShardedDataset(files[::-1], Lines())]
    assert all("the ranks list different shards of the training set" in each for each in on_ranks(datasets))
    assert all("list different shards" in each for each in on_ranks([ShardedDataset(files, Lines()), [1, 2]]))


def test_ranks_with_files_of_their_own_count_them(files: list[Path]) -> None:
    datasets = [ShardedDataset(files[:2], Lines()), ShardedDataset(files[2:], Lines())]
    datasets[1].set_length(2, 5)
    assert on_ranks(datasets, shared=False) == ["", ""]
    assert [dataset.lengths for dataset in datasets] == [(1, 2), (3, 4, 5)]


def test_a_length_that_is_no_number_is_named_on_all_ranks() -> None:
    datasets = [ShardedDataset(["ab"], Lines(), lengths=lambda shard: "three") for _ in range(2)]  # type: ignore[arg-type,return-value]
    assert all("shard ab cannot have 'three' samples" in message for message in on_ranks(datasets))


def test_other_data_sets_are_left_alone() -> None:
    assert on_ranks([[1], [2]]) == ["", ""]
