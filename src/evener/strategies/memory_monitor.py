"""What each step takes of a rank's memory, by what it is for, at the cost of two readings and a few sums.

Where a reading is dear beside short steps, as that of a process is, it is done 20 times a second at most. The steps in
between are told what was read last; a peak in one of them is that of the next that is looked at.

What a rank holds all the time does not change from step to step: it is summed up when the optimizer has made new state,
and every now and then, for what nobody could see change. The rest is worked out
(:mod:`evener.hardware.memory.step_usage`). Where each tensor is counted, what is counted is told.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evener.data.batch import Batch
from evener.distributed.environment import ranks_per_card
from evener.hardware.gpu_tenants import Neighbours, neighbours_on, uuid_of
from evener.hardware.memory import Accounting
from evener.hardware.memory.allocator_cache import lost_in_pieces, wanted_by_others, worth_emptying
from evener.hardware.memory.counters import BUCKETS, GRADIENTS, INPUTS
from evener.hardware.memory.interval_peak import Laps
from evener.hardware.memory.step_usage import NOTHING, Lap, MemoryUse, News, counted, use_of
from evener.hardware.memory.usage import Gauge, gauge_of
from evener.hardware.survey.nvml import find_nvml
from evener.strategies.interfaces import Watch
from evener.strategies.learner import Learner
from evener.strategies.memory_attribution import gradients_of, name_inputs, nbytes_of, nbytes_of_inputs

EVERY = 1000
"""Steps after which all is summed up again."""
OFTEN = 20
"""Steps after which it is asked again what was freed and is kept: that takes longer the more small pieces there are."""
LOOK_SECONDS = 30.0
"""Time after which it is asked again who else has memory of the card."""


@contextmanager
def watching(learner: Learner, account: Accounting | None) -> Iterator[Watch]:
    """Follows the memory of the learner's device; by ``account`` where that counts each tensor."""
    if account is not None:
        yield OfAccount(learner, account)
        return
    device = learner.session.device
    uuid = uuid_of(device) if ranks_per_card() == 1 else ""  # else others on the card are ranks, most likely
    with neighbours_on(uuid, find_nvml() if uuid else None) as neighbours:
        yield Read(learner, gauge_of(device), neighbours)


class Read:
    """From what ``gauge`` reads.

    Args:
        neighbours: On the same card, if they can be asked for.
        clock: Seconds that only go forward.
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
        """Whether the step is one to look at: also one with new state, and the last of an epoch, for no peak may be
        lost at the end."""
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
        # The peak of what has failed is that of this step, which is looked at.
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
        """What was found, if nothing of the kind was told before."""
        if not found or cause in self._told:
            return 0
        self._told.add(cause)
        return found

    def _of_neighbours(self, news: News, now: Lap) -> News:
        use = self._neighbours.look() if self._neighbours else None
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


class OfAccount:
    """What an accounting counts."""

    def __init__(self, learner: Learner, account: Accounting) -> None:
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
        pass  # what is counted is not cached
