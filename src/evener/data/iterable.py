"""Batches of iterable data sets, which have no length and no sample numbers.

The order of a stream is the order in which it yields. Every rank reads the whole stream, and computes its share of each
batch: the next ``batch_size`` items. So batches depend on no rank, shares may change, and a run may resume in mid-epoch
on another number of ranks, as with numbered samples::

    stream    0 1 2 3 4 | 5 6 7 8 9 | 10 11
    rank 0    0 1 2       5 6 7       10           shares 3, 2
    rank 1          3 4         8 9      11

No rank knows where the stream ends. So before each batch every rank tells the others how many items it found for it
(``agree``, one integer for each rank). It is the same number everywhere, or an error.

A stream that has ``state_dict`` and ``load_state_dict``, or whose iterator has them, is resumed by its state. States
are asked for between items, and each is kept with the digest of the item that followed. If a resumed stream begins with
another item, its state is not exact (that of a shuffle buffer mostly is not), or the item is random. Then, and if there
is no state, items before the position are read and dropped.

A data set that has a method ``shard(index, count)`` is not read whole: each rank reads the part that the method gives
it, with any number of workers. It then has no global order:

- A rank without further samples gets placeholders until all ranks are at their end. The epoch ends at the first batch
  for which no rank has a sample. A rank whose share is zero then may have unused samples left.
- On resume, each rank reads and drops an equal share of the samples before the position.

Workers are started again in every epoch, and the main process collates. At most one worker reads a whole stream,
because the loader cannot know whether the data set divides itself among workers.
"""

from __future__ import annotations

import inspect
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from evener.data.batch import Batch
from evener.data.batch_plan import BatchPlan, BatchPlanner
from evener.data.collate import Collate, preview
from evener.data.division import by_weights
from evener.data.fetch import Fetched, failure, join
from evener.data.fingerprint import digest_if_any
from evener.data.grains import GrainPlanner, requests_of
from evener.data.sampler import Ids
from evener.data.stream_state import RecentStates, StreamState, WholeStream, copied
from evener.data.workers import Workers
from evener.errors import DataError
from evener.hardware.generators import seeded

Agree = Callable[[int], Sequence[int]]
"""``agree(local_size)`` returns the ``local_size`` of every rank, by rank. All ranks must call it together."""

_CHUNK = 16  # items that a worker sends at once
_NOTHING_AT_ALL = -1
_DIGITS = 12  # hexadecimal, of a digest that ranks compare as a number


class Shard(IterableDataset[Any]):
    """One rank's part of an iterable data set, in lists of up to ``chunk`` items. Yields a failure as a value."""

    def __init__(self, dataset: Any, rank: int, world_size: int, chunk: int, name: str) -> None:
        self._dataset = dataset
        self._rank = rank
        self._world_size = world_size
        self._chunk = chunk
        self._name = name

    def __iter__(self) -> Iterator[Any]:
        try:
            items = self._part()
            while chunk := list(islice(items, self._chunk)):
                yield chunk
        except Exception as error:
            yield failure(error, f"reading the {self._name} on rank {self._rank}")

    def _part(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        index = self._rank + self._world_size * worker
        return iter(self._dataset.shard(index, self._world_size * workers))


class Items:
    """Numbers items and returns them in order. Keeps the last one, which may be needed as a placeholder."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = enumerate(items)
        self._waiting: deque[tuple[int, Any]] = deque()
        self._last: tuple[int, Any] | None = None

    def take_items(self, count: int) -> list[tuple[int, Any]]:
        """Returns the next ``count`` items with their numbers, or fewer at the end."""
        taken = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        taken += islice(self._items, count - len(taken))
        self._last = taken[-1] if taken else self._last
        return taken

    def any(self) -> tuple[int, Any] | None:
        """Returns the last item taken, or the next one if none was taken. Returns None if there is no item at all."""
        if self._last is None and not self._waiting:
            self._waiting += islice(self._items, 1)
        return self._last or next(iter(self._waiting), None)


class StreamBatches:
    """Makes the batches of an iterable data set, as ``batch_plan.plans`` and ``Fetch`` do for map-style ones.

    Args:
        resume: The state of the stream at or before the start, if a checkpoint has one.
        tell: Called with messages about the stream.
    """

    def __init__(
        self,
        dataset: Any,
        cut: BatchPlanner,
        agree: Agree,
        workers: Workers,
        collate: Collate | None,
        name: str,
        resume: StreamState | None = None,
        tell: Callable[[str], object] = lambda message: None,
    ) -> None:
        self._dataset, self._cut, self._agree, self._workers = dataset, cut, agree, workers
        self._collate, self._name, self._tell = collate, name, tell
        self._resume, self._compared = resume, cut.world_size == 1
        self._divided, self._seed = divides_itself(dataset), 0
        self.states = RecentStates()

    def batches(
        self, epochs: int, start: tuple[int, int], first_step: int, seed: int = 0
    ) -> Generator[Batch, None, None]:
        """Yields all batches from ``start`` on. Reads one batch ahead, to know the last one of each epoch.

        All ranks must call this together, because they agree on the size of each batch.

        Args:
            seed: The seed of random collation, if batches are cut into grains.
        """
        self._seed = seed
        step, read = first_step, self._epoch_of_parts if self._divided else self._epoch
        for epoch in range(start[0], epochs):
            position = start[1] if epoch == start[0] else 0
            held: Batch | None = None
            for batch in read(epoch, position, step):
                if held is not None:
                    yield held
                held, step = batch, step + 1
            if held is not None:
                yield replace(held, last=True)

    # The whole stream

    def _epoch(self, epoch: int, position: int, step: int) -> Iterator[Batch]:
        cut = self._cut
        with closing(self._from(epoch, position)) as items:
            while True:
                taken = list(islice(items, cut.batch_size))
                self._check_same(taken, position)
                if not taken:
                    return
                shares = cut.draw(step, len(taken))
                ids = np.arange(position, position + len(taken))
                reads, audits = cut.reads(ids, shares, 0), cut.audits(ids, shares, (epoch, position))
                index = position // cut.batch_size
                plan = BatchPlan(epoch, index, position, len(taken), shares, False, reads, 0, (), *audits)
                parts = [[taken[number - position] for number in ids.tolist()] for ids in plan.all_reads]
                values = self._values(parts, plan)
                self.states.made((epoch, position))
                del taken, parts
                batch = plan.batch(values)
                yield cut.marked(batch) if isinstance(cut, GrainPlanner) else batch
                position, step = position + plan.size, step + 1

    def _values(self, parts: list[list[Any]], plan: BatchPlan) -> list[Fetched]:
        """Collates the items of each micro-batch; those of a grain with random numbers of its own."""
        if not isinstance(self._cut, GrainPlanner):
            return [self._joined(part, ids) for part, (ids, _) in zip(parts, plan.reads, strict=True)]
        values = []
        for part, (ids, seed) in zip(parts, requests_of(plan, self._cut, self._seed), strict=True):
            with seeded(seed):
                values.append(self._joined(part, ids))
        return values

    def _check_same(self, taken: list[Any], position: int) -> None:
        """Compares the number of items that the ranks found, and once the first item. A collective call.

        Raises:
            DataError: If it is not the same number, or there is no item in the whole epoch.
        """
        sizes = [int(size) for size in self._agree(len(taken))]
        if len(set(sizes)) > 1:
            raise DataError(
                f"the {self._name} has another end on one rank than on another: at sample {position} the ranks have "
                f"{preview(sizes)} more. Every rank must read the same stream; one that divides itself does it by a "
                "method shard(index, count)"
            )
        if not taken and position == 0:
            raise DataError(
                f"the {self._name} is empty, or can be iterated only once: it gave no sample at all"
            )
        if not self._compared:
            self._compared = True
            digests = self._agree(int(digest_if_any(taken[0])[:_DIGITS] or "0", 16)) if taken else [0]
            if len(set(digests)) > 1 and isinstance(self._cut, GrainPlanner):
                raise DataError(
                    f"the first sample of the {self._name} is not the same on all ranks, and exact=bits cuts one "
                    "stream by position: give every rank the same stream, and seed what is random in it"
                )
            if len(set(digests)) > 1 and self._cut.rank == 0:
                warnings.warn(
                    f"the first sample of the {self._name} is not the same on all ranks. If it is random, all is well; "
                    "but a stream that divides itself by rank is divided twice, and its samples are lost: give every "
                    "rank the whole stream",
                    stacklevel=2,
                )

    def _from(self, epoch: int, position: int) -> Generator[Any, None, None]:
        """Yields the items from ``position`` on."""
        self._set_epoch(epoch)
        resume = self._resume
        if resume is not None and resume.epoch == epoch and resume.read <= position:
            copy = None if self._workers.count else copied(self._dataset)  # workers have copies
            reading = self._read(epoch, resume.read, resume.state, copy)
            first = list(islice(reading, 1))
            if all(self._agree(int(bool(first) and digest_if_any(first[0]) == resume.following))):
                self.states.keep(resume)
                yield from islice(chain(first, reading), position - resume.read, None)
                return
            reading.close()
            words = (
                f"the state of the {self._name} does not lead to the sample that came next before: it does not hold "
                "all (a shuffle buffer, perhaps), or samples are random"
            )
            if copy is None and not self._workers.count:
                raise DataError(f"{words}. It cannot be read again in this process: read it with one worker")
            self._tell(f"{words}. The {position} samples before are read again")
        with closing(self._read(epoch, 0, None)) as items:
            skipped = sum(1 for _ in islice(items, position))
            if skipped < position:
                raise DataError(
                    f"the {self._name} ended after {skipped} samples, and the run goes on after {position}: it must "
                    "give the same samples when it is read again"
                )
            yield from items

    def _read(self, epoch: int, count: int, state: Any, dataset: Any = None) -> Generator[Any, None, None]:
        """Yields the items from number ``count`` on, where the stream is in ``state``, and keeps further states."""
        workers = min(self._workers.count, 1)
        whole = WholeStream(
            self._dataset if dataset is None else dataset,
            _CHUNK if workers else 1,
            self._name,
            self._cut.rank,
            state,
        )
        found: Any = None
        with closing(self._open(whole, workers, epoch)) as chunks:
            for items, later in chunks:
                following = digest_if_any(items[0]) if found is not None else ""
                if following:
                    self.states.keep(StreamState(epoch, count, found, following))
                yield from items
                count, found = count + len(items), later

    def _open(self, reader: IterableDataset[Any], count: int, epoch: int) -> Any:
        # The seed depends on no position: a stream that is read again from its beginning must be the same.
        return replace(self._workers.begun_at(epoch), count=count, pin_memory=False).read(reader)

    def _set_epoch(self, epoch: int) -> None:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    # Parts of the ranks

    def _epoch_of_parts(self, epoch: int, position: int, step: int) -> Iterator[Batch]:
        self._set_epoch(epoch)
        cut, count = self._cut, self._workers.count
        shard = Shard(self._dataset, cut.rank, cut.world_size, _CHUNK if count else 1, self._name)
        with closing(self._open(shard, count, epoch)) as chunks:
            items = Items(chain.from_iterable(chunks))
            items.take_items(by_weights(position, [1] * cut.world_size)[cut.rank])
            while True:
                shares = cut.draw(step, cut.batch_size)
                taken = items.take_items(shares[cut.rank])
                spare = items.any()
                sizes = self._agreed(len(taken) if spare else _NOTHING_AT_ALL)
                if not any(sizes) or spare is None:
                    return
                yield self._batch(epoch, position, sizes, taken, spare)
                position, step = position + sum(sizes), step + 1

    def _agreed(self, local_size: int) -> tuple[int, ...]:
        """Gathers the number of samples that each rank has for the next batch. All ranks must call this together.

        Raises:
            DataError: If a rank never had any sample.
        """
        sizes = tuple(int(size) for size in self._agree(local_size))
        empty = [rank for rank, size in enumerate(sizes) if size == _NOTHING_AT_ALL]
        if empty:
            raise DataError(
                f"the {self._name} gave no sample at all to rank {preview(empty)} of {len(sizes)}; "
                "use at most as many ranks as it has parts"
            )
        return sizes

    def _batch(
        self,
        epoch: int,
        position: int,
        sizes: tuple[int, ...],
        taken: list[tuple[int, Any]],
        spare: tuple[int, Any],
    ) -> Batch:
        items = iter(taken)
        table = self._cut.table(sum(sizes), sizes)
        mine = [list(islice(items, len(row[self._cut.rank]))) for row in table]
        reads = [(self._ids(part or [spare]), int(len(part) > 0)) for part in mine]
        values = [
            self._joined([item for _, item in part or [spare]], ids)
            for part, (ids, _) in zip(mine, reads, strict=True)
        ]
        index = position // self._cut.batch_size
        return BatchPlan(epoch, index, position, sum(sizes), sizes, False, reads).batch(values)

    def _ids(self, part: list[tuple[int, Any]]) -> Ids:
        """Returns the index of each item in the whole data set, assuming that the items of the ranks alternate."""
        numbers = np.array([number for number, _ in part], dtype=np.int64)
        return numbers * self._cut.world_size + self._cut.rank

    def _joined(self, items: list[Any], ids: Ids) -> Fetched:
        try:
            return join(items, ids.tolist(), self._collate, self._name)
        except Exception as error:
            raise DataError(failure(error, f"collating the {self._name}").message) from error


def divides_itself(dataset: Any) -> bool:
    """Returns True if the data set has a method ``shard(index, count)``. That of Hugging Face's, which takes
    ``num_shards`` first, is another one."""
    shard = getattr(dataset, "shard", None)
    return callable(shard) and "num_shards" not in inspect.signature(shard).parameters
