"""Counts the samples of shards, once, before the training: each rank a part, and all of them know all lengths.

The counts are kept in a file of the run directory, with size and time of change of shards that are files. A file that
has changed since is counted anew. Other keys, such as addresses, are known by their names alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from evener.data.sharded import ShardedDataset
from evener.errors import ConfigurationError, DataError
from evener.files import read_json, write_json

COUNTS = "shard_counts.json"
"""The name of the file in a run directory."""

Gather = Callable[[Any], Sequence[Any]]
"""``gather(value)`` returns the values of all ranks, by rank. All ranks must call it together."""


def count_together(
    datasets: Mapping[str, Any],
    rank: int,
    gather: Gather,
    file: Path | None = None,
    limit_seconds: float = 300.0,
    shared: bool = True,
) -> None:
    """Counts what is not known of the sharded data sets. All ranks must call this together, whatever sets they have.

    Args:
        datasets: Data sets by their names in error messages. Those that have no shards are left alone.
        file: Rank 0 reads earlier counts there, and writes new ones.
        limit_seconds: The longest that one shard may take.
        shared: Whether all ranks list the same shards. If not, each counts its own.

    Raises:
        ConfigurationError: If ranks list different shards.
        DataError: If a shard cannot be counted; on all ranks.
    """
    saved = _saved(file) if rank == 0 and file is not None else {}
    for name, dataset in datasets.items():
        sharded = isinstance(dataset, ShardedDataset)
        if sharded:
            for index in dataset.uncounted:
                length = _unchanged(saved.get(dataset.names[index]), dataset.shards[index])
                if length is not None:
                    dataset.set_length(index, length)
        listed = zlib.crc32("\n".join(dataset.names).encode()) if sharded else None
        said = gather((listed, dict(dataset.known), len(dataset.uncounted)) if sharded else (None, {}, 0))
        if shared and len({each[0] for each in said}) > 1:
            raise ConfigurationError(
                f"the ranks list different shards of the {name}, or in another order: list the same on every rank, "
                "sorted; or, if each rank has files of its own, say so with Task(partition='sample')"
            )
        counted = sharded and bool(dataset.uncounted)
        try:
            _count(dataset if sharded else None, rank, gather, said, limit_seconds, shared)
        finally:
            if rank == 0 and file is not None and counted:
                saved |= {
                    dataset.names[index]: [length, *_state_of(dataset.shards[index])]
                    for index, length in dataset.known.items()
                }
                with suppress(OSError):  # what is not kept is counted once more
                    write_json(file, saved)


def _count(
    dataset: Any,
    rank: int,
    gather: Gather,
    said: Sequence[tuple[Any, Mapping[int, int], int]],
    limit_seconds: float,
    shared: bool,
) -> None:
    """Counts the shards whose lengths no rank has said. In each round a rank counts one shard, so none waits long."""
    ranks, rounds = len(said), max(uncounted for _, _, uncounted in said)
    if shared and dataset is not None:
        for _, known, _ in said:
            dataset.known |= known
        rounds = -(-len(dataset.uncounted) // ranks)
    missing = [] if dataset is None else dataset.uncounted
    mine = missing[rank::ranks] if shared else missing
    for turn in range(rounds):
        found = gather(_tried(dataset, mine[turn], limit_seconds) if turn < len(mine) else 0)
        _check(found)
        if shared:
            dataset.known |= zip(missing[turn * ranks :], found, strict=False)


def _tried(dataset: ShardedDataset, index: int, limit_seconds: float) -> int | str:
    """Counts a shard. Returns its length, or the error message."""
    try:
        dataset.set_length(index, dataset.count(index, limit_seconds))
    except (DataError, ConfigurationError) as error:
        return str(error)
    return dataset.known[index]


def _check(found: Sequence[int | str]) -> None:
    """Raises:
    DataError: If a rank could not count; with the message of the first.
    """
    for rank, each in enumerate(found):
        if isinstance(each, str):
            raise DataError(f"rank {rank}: {each}")


def are_counts(file: Path) -> bool:
    """Returns True for a file that this module wrote."""
    found = _saved(file)
    return bool(found) and all(
        type(entry) is list and {*map(type, entry)} == {int} for entry in found.values()
    )


def _saved(file: Path) -> dict[str, Any]:
    """Returns the counts of an earlier run; none if the file is missing or damaged."""
    with suppress(OSError, ValueError, DataError):
        found = read_json(file)
        if isinstance(found, dict):
            return found
    return {}


def _unchanged(entry: Any, shard: Any) -> int | None:
    """Returns the saved length of a shard. Returns None if it is not known, or the file has changed since."""
    if not isinstance(entry, list) or not entry or type(entry[0]) is not int or entry[0] < 0:
        return None
    return entry[0] if entry[1:] == _state_of(shard) else None


def _state_of(shard: Any) -> list[int]:
    """Returns the size and the time of the last change of a shard that is a file; empty for others."""
    try:
        found = Path(shard).stat()
    except (OSError, TypeError, ValueError):
        return []
    return [found.st_size, found.st_mtime_ns]
