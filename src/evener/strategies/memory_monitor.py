"""Measures the memory that each step uses, by category, at the cost of two readings and a few sums per step.

Reading the memory of a process is slow compared with short steps, so that it is read at most 20 times a second. The
steps between two readings repeat the last reading. A peak in one of them is reported with the next reading.

The memory that a rank holds permanently (parameters, buffers, optimizer state) rarely changes. It is summed when the
optimizer has made new state, and every 1000 steps in case of unnoticed changes. The rest is computed from the readings
(:mod:`evener.hardware.memory.step_usage`). If a memory tracker counts each tensor, its counts are reported instead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evener.data.batch import Batch
from evener.distributed.environment import ranks_per_card
from evener.hardware.gpu_tenants import Neighbours, neighbours_on, uuid_of
from evener.hardware.memory import MemoryTracker
from evener.hardware.memory.allocator_cache import lost_in_pieces, wanted_by_others, worth_emptying
from evener.hardware.memory.counters import BUCKETS, GRADIENTS, INPUTS
from evener.hardware.memory.interval_peak import Laps
from evener.hardware.memory.step_usage import NOTHING, Lap, MemoryUse, News, counted, use_of
from evener.hardware.memory.usage import Gauge, gauge_of
from evener.hardware.survey.nvml import find_nvml
from evener.strategies.interfaces import MemoryWatch
from evener.strategies.learner import Learner
from evener.strategies.memory_attribution import gradients_of, name_inputs, nbytes_of, nbytes_of_inputs

EVERY = 1000
"""Number of steps after which the permanent memory is summed again."""
OFTEN = 20
"""Number of steps after which the gauge is asked again for memory that was freed but not returned. The answer takes
longer the more small pieces there are."""
LOOK_SECONDS = 30.0
"""Seconds after which other processes' use of the GPU's memory is read again."""


@contextmanager
def watching(learner: Learner, account: MemoryTracker | None) -> Iterator[MemoryWatch]:
    """Measures the memory of the learner's device within the block; with ``account``, by counting each tensor."""
    if account is not None:
        yield OfAccount(learner, account)
        return
    device = learner.session.device
    if learner.settings.lean:
        yield Unwatched(learner, gauge_of(device))
        return
    uuid = uuid_of(device) if ranks_per_card() == 1 else ""  # else neighbours are probably ranks
    with neighbours_on(uuid, find_nvml() if uuid else None) as neighbours:
        yield Read(learner, gauge_of(device), neighbours)


class Read:
    """Measures memory by the readings of ``gauge``.

    Args:
        neighbours: The other processes on the same GPU, if they can be read.
        clock: A monotonic clock in seconds.
    """

    def __init__(
        self,
        learner: Learner,
        gauge: Gauge,
        neighbours: Neighbours | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._learner, self._gauge = learner, Laps(gauge)
        self._known: dict[str, int] = {}
        self._states = self._age = -1
        self._kept = self._won = self._pid = 0
        self._told: set[str] = set()
        self._neighbours, self._clock, self._looked = neighbours, clock, -math.inf
        self._before = self._between = self._gauge.lap()
        self._use, self._read, self._looks, self._passed_by = NOTHING, -math.inf, True, False

    def begin(self, batch: Batch) -> None:
        self._passed_by, self._looks = not self._looks, self._is_due(batch)
        if self._looks and not self._passed_by:
            self._between = self._gauge.lap()

    def _is_due(self, batch: Batch) -> bool:
        """Returns True if memory is to be read in this step. Steps with new optimizer state and the last step of an
        epoch are always read, so that no peak is lost at the end."""
        every = self._gauge.every_seconds
        if not every or batch.last or len(self._learner.optimizer.state) != self._states:
            return True
        return self._clock() - self._read >= every

    def part(self) -> Lap:
        return self._gauge.part()

    def end(self, batch: Batch) -> MemoryUse:
        if not self._looks:
            return self._use
        passes, self._read = self._gauge.lap(), self._clock()
        between = passes._replace(peak=0) if self._passed_by else self._between
        self._sum_up()
        known = {**self._known, INPUTS: nbytes_of_inputs(batch, self._learner.session.device)}
        self._use = use_of(between, passes, known, self._kept)
        return self._use if passes.reserved == 0 else self._use._replace(news=self._news(passes))

    def relieve(self, asked: int) -> None:
        found = self._gauge.lap()
        if worth_emptying(found, asked):
            self._empty(found)
        # The peak of the failed attempt belongs to this step, so that this step must be read.
        before = 0 if self._passed_by or not self._looks else self._between.peak
        self._between = found._replace(peak=max(before, found.peak))
        self._looks, self._passed_by = True, False

    def _empty(self, found: Lap) -> None:
        self._gauge.empty()
        self._won += max(0, found.reserved - self._gauge.lap().reserved)

    def _sum_up(self) -> None:
        states = len(self._learner.optimizer.state)
        self._age += 1
        if states != self._states or self._age >= EVERY:
            self._states, self._age = states, 0
            buckets = {BUCKETS: self._learner.synchronizer.bucket_nbytes}
            self._known = nbytes_of(self._learner) | buckets
        if self._age % OFTEN == 0:
            self._kept = self._gauge.kept()

    def _news(self, now: Lap) -> News:
        news = News(
            lost=self._once("lost", lost_in_pieces(self._before, now)),
            retries=self._once("retries", now.retries - self._before.retries),
        )
        self._before = now
        if self._clock() - self._looked >= LOOK_SECONDS:
            self._looked = self._clock()
            news = self._of_neighbours(news, now)
        won, self._won = self._won, 0
        return news._replace(won=won)

    def _once(self, cause: str, found: int) -> int:
        """Returns ``found`` the first time it is not 0 for this cause; afterwards 0."""
        if not found or cause in self._told:
            return 0
        self._told.add(cause)
        return found

    def _of_neighbours(self, news: News, now: Lap) -> News:
        use = self._neighbours.read_usage() if self._neighbours else None
        if use is None or not use.others:
            return news
        others = sum(other.nbytes for other in use.others)
        if wanted_by_others(now, use.free, use.total, others):
            self._empty(now)
        largest = max(use.others, key=lambda other: other.nbytes)
        if largest.pid == self._pid:
            return news
        self._pid = largest.pid
        return news._replace(others=others, pid=largest.pid, free=use.free)


class Unwatched(Read):
    """Reads no memory in a step. What the allocator keeps is still given back when memory runs out."""

    def begin(self, batch: Batch) -> None:
        pass

    def end(self, batch: Batch) -> MemoryUse:
        return NOTHING


class OfAccount:
    """Reports the counts of a memory tracker."""

    def __init__(self, learner: Learner, account: MemoryTracker) -> None:
        self._learner, self._account = learner, account
        self._highest = NOTHING

    def begin(self, batch: Batch) -> None:
        name_inputs(self._account, batch)

    def part(self) -> Lap:
        account = self._account
        account.name(GRADIENTS, gradients_of(self._learner))
        lap = Lap(account.held, account.peak)
        if lap.peak > self._highest.peak:
            self._highest = counted(lap, lap.peak, account.at_peak())
        account.reset_peak()
        return lap

    def end(self, batch: Batch) -> MemoryUse:
        held = self.part().held
        highest, self._highest = self._highest, NOTHING
        return highest._replace(held=held)

    def relieve(self, asked: int) -> None:
        pass  # a tracker counts tensors, and no allocator cache
