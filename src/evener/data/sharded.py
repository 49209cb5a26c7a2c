"""A data set of samples that are stored in shards: files, or any keys, that a function of the user opens.

A shard can only be read from its beginning. But its length is known, given or counted once, so each sample has a number
and each epoch an order (:mod:`evener.data.shard_order`). To the rest of Evener this is a data set with numbers: shares,
resuming, epochs and schedulers need nothing of their own.

A reader keeps the shards open that it is reading. To read a sample it skips those before it, which other ranks or
workers read. An earlier sample makes it open the shard once more: slow, and rare in the order of shards.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch.utils.data import Dataset

from evener.core.text import few
from evener.data.fetch import SurplusError, failure
from evener.data.shard_order import ShardOrder
from evener.errors import ConfigurationError, DataError

_COUNT_SECONDS = 300.0
_LOOKS = 1024  # samples counted between two looks at the clock
_END = object()


class ShardedDataset(Dataset[Any]):
    """Samples in shards, each opened by ``opener`` and read from its beginning.

    Args:
        shards: The keys of the shards, such as paths: the same list in the same order on every rank and in every run.
        opener: Takes a key and returns the shard's samples: a generator, or anything else that can be iterated. They
            must have the same number and order at each call. If it has ``__getitem__`` and ``__len__``, as a list or a
            table has, samples are read by number and none is skipped over.
        decode: Makes an item of what the opener yields. Called for the samples that this rank trains on, while the
            opener also yields those that it skips over; so put what takes time here.
        lengths: The number of samples of each shard, or a function from a key to it. None: each shard is read once
            before the training, to count; a run keeps the counts in its directory.
        together: The number of shards that are read at once, and so mixed in a batch.
        window: The number of consecutive samples of a shard that are shuffled, and kept in memory for each open shard.

    Raises:
        ConfigurationError: If there is no shard, one is listed twice, or lengths do not fit.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        opener: Callable[[Any], Iterable[Any]],
        *,
        decode: Callable[[Any], Any] | None = None,
        lengths: Sequence[int] | Callable[[Any], int] | None = None,
        together: int = 8,
        window: int = 0,
    ) -> None:
        self.shards, self.names = _checked(shards)
        self.together, self.window = together, window
        self._opener, self._decode = opener, decode
        self._length_of = lengths if callable(lengths) else None
        self.known: dict[int, int] = {}
        """The lengths of shards that are known, by the shard's index."""
        if lengths is not None and not callable(lengths):
            if len(lengths) != len(self.shards):
                raise ConfigurationError(f"there are {len(self.shards)} shards, and {len(lengths)} lengths")
            for index, length in enumerate(lengths):
                self.set_length(index, length)
        # This says what is wrong, before anything is read.
        ShardOrder(1, lengths=(1,), together=together, window=window)
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._process = os.getpid()

    # Lengths

    def set_length(self, index: int, length: int) -> None:
        """Sets the number of samples of a shard."""
        if not hasattr(length, "__index__") or int(length) < 0:
            raise ConfigurationError(f"shard {self.names[index]} cannot have {length!r} samples")
        self.known[index] = int(length)

    @property
    def uncounted(self) -> list[int]:
        """The indices of the shards whose lengths are not known."""
        return [index for index in range(len(self.shards)) if index not in self.known]

    def count(self, index: int, limit_seconds: float = _COUNT_SECONDS) -> int:
        """Returns the number of samples of a shard: by the user's function, or its ``len``, or by reading it.

        Raises:
            DataError: If reading fails, or does not end within the limit.
        """
        name, seen, began = self.names[index], 0, time.monotonic()
        try:
            if self._length_of is not None:
                return self._length_of(self.shards[index])
            with _closed(self._opener(self.shards[index])) as source:
                if isinstance(source, Sized):
                    return len(source)
                for seen, _ in enumerate(source, 1):
                    if seen % _LOOKS == 0 and time.monotonic() - began > limit_seconds:
                        break
                else:
                    return seen
        except Exception as error:
            raise _failed(error, seen, name, "counting") from error
        raise DataError(
            f"shard {name} gave {seen} samples in {limit_seconds:g} seconds of counting and has not ended: give the "
            "lengths (lengths=), or a function that knows them; an endless shard has no epochs, so make it an "
            "IterableDataset, and give the run a number of steps"
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of samples of each shard. Counts those that are not known."""
        for index in self.uncounted:
            self.set_length(index, self.count(index))
        return tuple(self.known[index] for index in range(len(self.shards)))

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.lengths))

    def __len__(self) -> int:
        return self._ends[-1]

    def global_order(self, seed: int) -> ShardOrder:
        """Returns the order of training for a seed."""
        return ShardOrder.of_lengths(self.lengths, seed, self.together, self.window)

    def batch_sampler(self, batch_size: int, generator: torch.Generator | None = None) -> ShardBatchSampler:
        """Returns the batch sampler of a ``DataLoader`` of this data set, with a new order in each pass."""
        return ShardBatchSampler(self, batch_size, generator)

    # Samples

    def place(self, sample: int) -> tuple[int, int]:
        """Returns the shard of a sample and its number there."""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} is not one of {len(self)}")
        shard = bisect_right(self._ends, sample)
        return shard, sample - (self._ends[shard - 1] if shard else 0)

    def describe_sample(self, sample: int) -> str:
        """Returns the name of a sample for messages."""
        shard, number = self.place(sample)
        return f"sample {number} of shard {self.names[shard]}"

    def places_to_look(self, most: int) -> list[int]:
        """Returns samples that are quickly read: the first ones of at most ``most`` shards."""
        filled = [index for index, length in enumerate(self.lengths) if length]
        chosen = sorted({filled[round(at * (len(filled) - 1) / max(1, most - 1))] for at in range(most)})
        return [self._ends[index] - self.known[index] for index in chosen]

    def __getitem__(self, sample: int) -> Any:
        shard, number = self.place(int(sample))
        record = self._reader(shard, number).record(number)
        return record if self._decode is None else self._decode(record)

    def __getitems__(self, samples: Sequence[int]) -> list[Any]:
        return [self[sample] for sample in samples]

    def _reader(self, shard: int, number: int) -> _OpenShard:
        """Returns the open shard, positioned at or before a sample."""
        if self._process != os.getpid():  # a forked worker: files opened before the fork share their position
            self._open, self._process = OrderedDict(), os.getpid()
        found = self._open.get(shard)
        if found is None or not found.can_read(number):
            if found is not None:
                found.close()
            name, length = self.names[shard], self.known[shard]
            try:
                source = self._opener(self.shards[shard])
                self._open[shard] = found = _OpenShard(name, source, length, self.window)
            except Exception as error:
                self._open.pop(shard, None)
                if isinstance(error, SurplusError):
                    raise
                raise _failed(error, 0, name) from error
        self._open.move_to_end(shard)
        while len(self._open) > 2 * self.together:  # those of two blocks
            self._open.popitem(last=False)[1].close()
        return found

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict()}


class _OpenShard:
    """A shard that is being read. Keeps the samples of the current window, and at least the last one."""

    def __init__(self, name: str, source: Iterable[Any], length: int, window: int) -> None:
        self._name, self._length, self._window = name, length, max(1, window)
        self._table: Any = source if hasattr(source, "__getitem__") and isinstance(source, Sized) else None
        if self._table is not None and len(self._table) != length:
            error = self._changed(f"has {len(self._table)} samples")
            raise SurplusError(str(error)) if len(self._table) > length else error
        self._source = source
        self._records: Iterator[Any] = iter(source if self._table is None else ())
        self._next, self._kept = 0, dict[int, Any]()
        self._failure: DataError | None = None

    def can_read(self, number: int) -> bool:
        """Returns True if the sample was not passed yet, or is kept."""
        return self._table is not None or number >= self._next or number in self._kept

    def record(self, number: int) -> Any:
        """Returns what the opener yields as the sample of this number."""
        if self._table is not None:
            return self._table[number]
        if number in self._kept:
            return self._kept[number]
        # An iterator that has raised has ended: the samples behind are lost too.
        if self._failure is not None:
            raise self._failure
        while self._next <= number:
            try:
                self._advance()
            except DataError as error:
                self._failure = error
                raise
            except Exception as error:
                self._failure = _failed(error, self._next, self._name)
                raise self._failure from error
        return self._kept[number]

    def _advance(self) -> None:
        record = next(self._records, _END)
        if record is _END:
            raise self._changed(f"ended after {self._next} samples")
        is_last = self._next + 1 == self._length
        if is_last and next(self._records, _END) is not _END:
            raise SurplusError(str(self._changed(f"has more than {self._length} samples")))
        if self._next % self._window == 0:
            self._kept.clear()
        self._kept[self._next] = record
        self._next += 1
        if is_last:
            self.close()

    def _changed(self, seen: str) -> DataError:
        return DataError(
            f"shard {self._name} {seen}, and was counted or said to have {self._length}: it must not change during a "
            "run, nor give another number of samples each time it is opened; begin a new run, in another directory or "
            "with --overwrite, which counts anew"
        )

    def close(self) -> None:
        """Closes the user's generator, which closes its file, or the file itself."""
        with _closed(self._source):
            pass


class ShardBatchSampler:
    """Yields the sample ids of each batch of an epoch: for ``DataLoader(dataset, batch_sampler=...)``.

    Draws the seed of each pass from ``generator``, or from torch's default one, as ``RandomSampler`` does.
    """

    def __init__(
        self, dataset: ShardedDataset, batch_size: int, generator: torch.Generator | None = None
    ) -> None:
        if batch_size < 1:
            raise ConfigurationError(f"the batch size must be at least 1, not {batch_size}")
        self._dataset, self.batch_size, self._generator = dataset, batch_size, generator

    def __len__(self) -> int:
        return -(-len(self._dataset) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())
        order = self._dataset.global_order(seed)
        for start, stop in order.batches(self.batch_size):
            yield order.ids(0, start, stop).tolist()


@contextmanager
def _closed(source: Any) -> Iterator[Any]:
    """Closes a generator or a file after the block."""
    try:
        yield source
    finally:
        if hasattr(source, "close") and not isinstance(source, Sized):  # a table may be the user's own
            source.close()


def _checked(shards: Any) -> tuple[list[Any], list[str]]:
    """Returns the keys and names of the shards."""
    if isinstance(shards, str | bytes | Mapping) or not (
        hasattr(shards, "__len__") and hasattr(shards, "__getitem__")
    ):
        raise ConfigurationError(
            f"shards is a {type(shards).__name__}: give a list of the keys of all shards, such as "
            "sorted(glob('*.tar'))"
        )
    listed = list(shards)
    names = [str(key) for key in listed]
    if not names:
        raise ConfigurationError(
            "the list of shards is empty: give at least one; did a pattern match no file?"
        )
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ConfigurationError(
            f"shards are listed twice, so that their samples would count twice: {few(twice)}; list each once"
        )
    return listed, names


def _failed(error: Exception, number: int, name: str, doing: str = "reading") -> DataError:
    return DataError(failure(error, f"{doing} sample {number} of shard {name}").message)
