"""Sections of asynchronous training: stretches of the global order in which workers draw ranges as they become free.

A section takes the place of a batch: all ranks meet at its ends, and between them each computes at its own pace. Which
rank computes what is not planned ahead. So the samples of a range are read when the range is leased
(:mod:`evener.strategies.asynchronous.ledger`): at once, or ahead of time by worker processes that read data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import Dataset

from evener.data.batch import Batch
from evener.data.batch_plan import BatchPlan, BatchPlanner
from evener.data.prefetch import Delivery
from evener.data.sampler import Ids, Order
from evener.data.workers import Workers


@dataclass(frozen=True)
class Sections:
    """How a training is divided into sections."""

    batches: int
    """The number of batches in a section."""
    batch_size: int
    """The number of samples in a batch, over all ranks."""
    ranks: int
    micro_batch: int | None = None
    """The number of samples in a pass, over all ranks. None means the whole range that a rank computes."""

    @property
    def size(self) -> int:
        """The number of samples in a section."""
        return self.batches * self.batch_size

    @property
    def parts(self) -> int:
        """The number of shares of a section: one for each rank."""
        return self.ranks

    @property
    def meets(self) -> bool:
        """True if no other rank computes at its own pace."""
        return self.ranks == 1

    def count(self, batches: int | None) -> int | None:
        """Returns the number of sections that ``batches`` batches take."""
        return None if batches is None else -(-batches // self.batches)

    def of_ranks(self, shares: Sequence[int]) -> tuple[int, ...]:
        """Returns the shares of the ranks."""
        return tuple(shares)

    def passes(self, start: int, stop: int) -> list[range]:
        """Cuts a range into passes of a rank's part of the micro-batch."""
        most = stop - start if self.micro_batch is None else max(1, self.micro_batch // self.ranks)
        return [range(at, min(at + most, stop)) for at in range(start, stop, most)]


class RangeReader:
    """Reads the passes of leased ranges, in the order in which they are leased."""

    def __init__(
        self, order: Order, sections: Sections, fetch: Dataset[Any], workers: Workers, delivery: Delivery
    ) -> None:
        self._order, self._sections = order, sections
        self.ahead = workers.ahead
        """The number of requests that are read ahead. Nothing is leased ahead if it is 0."""
        self._plan: BatchPlan | None = None
        self._draw: Callable[[], tuple[int, range] | None] = lambda: None
        self._given: deque[tuple[int, range]] = deque()
        self._requested: deque[tuple[int, int]] = deque()  # leases with their numbers of passes
        # Requests whose values were not returned yet.
        self._asked: deque[tuple[Ids, BatchPlan] | None] = deque()
        self._values = workers.read(_OrNothing(fetch), self._requests())
        self._batches = delivery(self._filled())

    def begin(self, plan: BatchPlan, draw: Callable[[], tuple[int, range] | None]) -> None:
        """Begins a section.

        Args:
            draw: Leases a range to read ahead; returns its number and its positions in the section, or None.
        """
        self._plan, self._draw = plan, draw

    @property
    def epoch_size(self) -> int:
        """The number of samples of an epoch."""
        return self._order.size

    @property
    def first(self) -> int | None:
        """The number of the first leased range that is being read. None if there is none."""
        return self._requested[0][0] if self._requested else None

    def lease(self, number: int, positions: range) -> None:
        """Adds a range that is to be computed next."""
        self._given.append((number, positions))

    def read(self) -> list[Batch]:
        """Returns the passes of the first leased range: each a batch of one micro-batch."""
        found: list[Batch] = []
        while not self._requested or len(found) < self._requested[0][1]:
            batch = next(self._batches)
            if batch.micro_batches:
                found.append(batch)
        self._requested.popleft()
        return found

    def end(self) -> None:
        """Ends a section. Ranges that were read and are not leased any more are dropped."""
        self._draw = lambda: None
        while self._requested:
            self.read()

    def _requests(self) -> Iterator[Ids | None]:
        """Yields the samples of each pass, and None while there is nothing to read."""
        while True:
            leased = self._given.popleft() if self._given else self._draw()
            if leased is None:
                self._asked.append(None)
                yield None
                continue
            number, positions = leased
            assert self._plan is not None
            passes = self._sections.passes(positions.start, positions.stop)
            self._requested.append((number, len(passes)))
            for each in passes:
                begin = self._plan.position + each.start
                ids = self._order.ids(self._plan.epoch, begin, begin + len(each))
                self._asked.append((ids, self._plan))
                yield ids

    def _filled(self) -> Generator[Batch, None, None]:
        for value in self._values:
            asked = self._asked.popleft()
            if asked is None:
                yield Batch(0, 0, 0, 0, (), [], False)
            else:
                ids, plan = asked
                yield replace(plan, reads=[(ids, 1)]).batch([value])

    def close(self) -> None:
        """Ends the worker processes."""
        self._batches.close()
        self._values.close()


class _OrNothing(Dataset[Any]):
    """Returns None for a request of None."""

    def __init__(self, fetch: Dataset[Any]) -> None:
        self._fetch = fetch

    def __getitem__(self, samples: Ids | None) -> Any:
        return None if samples is None else self._fetch[samples]


@dataclass
class SectionBatch(Batch):
    """A section. Its samples are read while it is computed; ``micro_batches`` is empty."""

    plan: BatchPlan | None = None
    reader: RangeReader | None = None


class SectionBatches(Iterator[Batch]):
    """Yields the sections of the plans."""

    def __init__(self, drawn: Iterator[BatchPlan], reader: RangeReader) -> None:
        self._drawn, self._reader = drawn, reader

    def __next__(self) -> Batch:
        plan = next(self._drawn)
        place = (plan.epoch, plan.index, plan.position, plan.size, plan.shares)
        return SectionBatch(*place, [], plan.last, plan=plan, reader=self._reader)

    def close(self) -> None:
        """Ends the reader."""
        self._reader.close()


@dataclass(frozen=True)
class SectionPlanner(BatchPlanner):
    """Plans sections: where they begin and end."""

    def reads(self, ids: Ids, shares: tuple[int, ...], done: int) -> list[tuple[Ids, int]]:
        return []
