"""What each step takes of a rank's memory, by what it is for, at the cost of two readings and a few sums.

What a rank holds all the time does not change from step to step: it is summed up when the optimizer has made new state,
and every now and then, for what nobody could see change. The rest is worked out (:mod:`evener.memory.use`). Where each
tensor is counted, what is counted is told.
"""

from __future__ import annotations

from evener.data.batch import Batch
from evener.memory import Accounting
from evener.memory.gauge import Gauge
from evener.memory.tally import BUCKETS, GRADIENTS, INPUTS
from evener.memory.use import Lap, MemoryUse, counted, use_of
from evener.strategies.holdings import gradients_of, name_inputs, nbytes_of, nbytes_of_inputs
from evener.strategies.learner import Learner

EVERY = 1000
"""Steps after which all is summed up again."""
OFTEN = 20
"""Steps after which it is asked again what was freed and is kept: that takes longer the more small pieces there are."""


class Read:
    """From what ``gauge`` reads."""

    def __init__(self, learner: Learner, gauge: Gauge) -> None:
        self._learner, self._gauge = learner, gauge
        self._between = Lap(0, 0)
        self._known: dict[str, int] = {}
        self._states = self._age = -1
        self._kept = 0

    def begin(self, batch: Batch) -> None:
        self._between = self._gauge.lap()

    def end(self, batch: Batch) -> MemoryUse:
        passes = self._gauge.lap()
        self._sum_up()
        known = {**self._known, INPUTS: nbytes_of_inputs(batch, self._learner.session.device)}
        return use_of(self._between, passes, known, self._kept)

    def _sum_up(self) -> None:
        states = len(self._learner.optimizer.state)
        self._age += 1
        if states != self._states or self._age >= EVERY:
            self._states, self._age = states, 0
            buckets = {BUCKETS: self._learner.synchronizer.bucket_nbytes}
            self._known = nbytes_of(self._learner) | buckets
        if self._age % OFTEN == 0:
            self._kept = self._gauge.kept()


class OfAccount:
    """What an accounting counts."""

    def __init__(self, learner: Learner, account: Accounting) -> None:
        self._learner, self._account = learner, account

    def begin(self, batch: Batch) -> None:
        name_inputs(self._account, batch)

    def end(self, batch: Batch) -> MemoryUse:
        account = self._account
        account.name(GRADIENTS, gradients_of(self._learner))
        use = counted(Lap(account.held, account.peak), account.peak, account.at_peak())
        account.reset_peak()
        return use
