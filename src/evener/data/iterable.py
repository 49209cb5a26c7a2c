"""Batches of iterable data sets, which have no positions and no length.

An iterable data set has no global order: each rank reads its own part. The loader guarantees that each sample is used
once and that all ranks use the same size for every batch. No rank knows how many samples the others have left. So
before each batch every rank tells the others how many samples it has for it (``agree``, one integer for each rank).
This is the only communication of the loader.

Limits, besides the missing order:

- If a data set has a method ``shard(index, count)``, that method gives the rank its part, and any number of workers
  may read it. Of other data sets, rank ``r`` uses items ``r, r + world_size, ...`` and skips the rest. At most one
  worker reads them, because the loader cannot know whether the data set divides itself among workers.
- A rank without further samples gets placeholders until all ranks are at their end. The epoch ends at the first batch
  for which no rank has a sample. A rank whose share is zero then may have unused samples left.
- On resume, each rank reads and drops an equal share of the samples before the position.
- Workers are started again in every epoch, and the main process collates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from evener.data.batch import Batch
from evener.data.batch_plan import BatchPlan, BatchPlanner
from evener.data.collate import Collate, preview
from evener.data.division import by_weights
from evener.data.fetch import Fetched, failure, join
from evener.data.workers import Workers
from evener.errors import DataError

Agree = Callable[[int], Sequence[int]]
"""``agree(local_size)`` returns the ``local_size`` of every rank, by rank. All ranks must call it together."""

_CHUNK = 16  # items that a worker sends at once
_NOTHING_AT_ALL = -1


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
        if not hasattr(self._dataset, "shard"):
            return islice(self._dataset, self._rank, None, self._world_size)
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


@dataclass(frozen=True)
class StreamBatches:
    """Makes the batches of an iterable data set, as ``batch_plan.plans`` and ``Fetch`` do for map-style ones."""

    dataset: Any
    cut: BatchPlanner
    agree: Agree
    workers: Workers
    collate: Collate | None
    name: str

    def batches(self, epochs: int, start: tuple[int, int], first_step: int) -> Generator[Batch, None, None]:
        """Yields all batches from ``start`` on. Reads one batch ahead, to know the last one of each epoch.

        All ranks must call this together, because they agree on the size of each batch.
        """
        step = first_step
        for epoch in range(start[0], epochs):
            position = start[1] if epoch == start[0] else 0
            held: Batch | None = None
            for batch in self._epoch(epoch, position, step):
                if held is not None:
                    yield held
                held, step = batch, step + 1
            if held is not None:
                yield replace(held, last=True)

    def _epoch(self, epoch: int, position: int, step: int) -> Iterator[Batch]:
        with closing(self._open(epoch)) as chunks:
            items = Items(chain.from_iterable(chunks))
            items.take_items(by_weights(position, [1] * self.cut.world_size)[self.cut.rank])
            while True:
                shares = self.cut.draw(step, self.cut.batch_size)
                taken = items.take_items(shares[self.cut.rank])
                spare = items.any()
                sizes = self._agreed(len(taken) if spare else _NOTHING_AT_ALL)
                if not any(sizes) or spare is None:
                    return
                yield self._batch(epoch, position, sizes, taken, spare)
                position, step = position + sum(sizes), step + 1

    def _open(self, epoch: int) -> Any:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        count = self.workers.count if hasattr(self.dataset, "shard") else min(self.workers.count, 1)
        cut = self.cut
        shard = Shard(self.dataset, cut.rank, cut.world_size, _CHUNK if count else 1, self.name)
        return replace(self.workers, count=count, pin_memory=False).read(shard)

    def _agreed(self, local_size: int) -> tuple[int, ...]:
        """Gathers the number of samples that each rank has for the next batch. All ranks must call this together.

        Raises:
            DataError: If a rank never had any sample.
        """
        sizes = tuple(int(size) for size in self.agree(local_size))
        empty = [rank for rank, size in enumerate(sizes) if size == _NOTHING_AT_ALL]
        if empty:
            raise DataError(
                f"the {self.name} gave no sample at all to rank {preview(empty)} of {len(sizes)}; "
                "use at most as many ranks as it has samples (or parts, if it shards itself)"
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
        table = self.cut.table(sum(sizes), sizes)
        mine = [list(islice(items, len(row[self.cut.rank]))) for row in table]
        reads = [(self._ids(part or [spare]), int(len(part) > 0)) for part in mine]
        values = [self._joined(part or [spare]) for part in mine]
        index = position // self.cut.batch_size
        return BatchPlan(epoch, index, position, sum(sizes), sizes, False, reads).batch(values)

    def _ids(self, part: list[tuple[int, Any]]) -> Any:
        """Returns the index of each item in the whole data set, assuming that the items of the ranks alternate."""
        numbers = np.array([number for number, _ in part], dtype=np.int64)
        return numbers * self.cut.world_size + self.cut.rank

    def _joined(self, part: list[tuple[int, Any]]) -> Fetched:
        try:
            return join([item for _, item in part], self._ids(part).tolist(), self.collate, self.name)
        except Exception as error:
            raise DataError(failure(error, f"collating the {self.name}").message) from error
