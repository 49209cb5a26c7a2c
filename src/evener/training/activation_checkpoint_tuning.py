"""Blocks that are computed again for a budget: measured in a run's first steps, chosen by all ranks, and looked after.

::

    step 0    1          2        3             4 ...
         ┌─ all blocks are computed again ─┐
         count   count,     time  ▲ count       nobody looks on any more
         what is blocks           │ and compare
         made    looked at        choice, by all ranks

Counting begins with the first step, which makes what later ones find: buckets, the optimizer's state. What the choice
takes is counted, too. If it is more than was thought, the next has so much less to spend. A step with fewer samples
than one before, such as the last of an epoch, does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from evener.components.activation_checkpoint import messages as words
from evener.components.activation_checkpoint.policy import AGAIN, Measured, Way, chosen
from evener.components.activation_checkpoint.profiling import Counted, Timed, measured
from evener.core.records import Note
from evener.data.batch import Batch
from evener.errors import ConfigurationError
from evener.hardware.async_read import Readout
from evener.hardware.memory import Accounting
from evener.hardware.timers import stopwatch
from evener.strategies.learner import Learner
from evener.strategies.memory_attribution import name_inputs, name_model

MEASURED_STEPS = 3
CHOICES = 4
"""So many are tried before all blocks are computed again for good, which was measured to fit."""


class Recomputing:
    """What of a learner's model is computed again, from its first step on.

    Args:
        tell: Gets a record of what was chosen, on all ranks.
    """

    def __init__(self, learner: Learner, tell: Callable[[Note], object]) -> None:
        self._learner, self._tell = learner, tell
        self._asked = learner.settings.recompute
        self._watch = partial(stopwatch, learner.session.device)
        self._steps = self._size = 0
        self._account: Accounting | None = None
        if self._asked is not None and self._asked.is_budget:
            self._account = Accounting(device_type=learner.session.device.type)
        self.words = "" if self._asked is None else words.before(self._asked, self._count, MEASURED_STEPS)
        """What a run says of it now."""

    @property
    def _count(self) -> int:
        return len(self._learner.recomputed.names)

    def step(self, batch: Batch, number: int) -> AbstractContextManager[None]:
        """Around a step; those in which something is measured end with collective calls.

        Raises:
            ConfigurationError: For a budget that cannot be met; on all ranks.
        """
        is_idle = self._account is None and self._asked is None
        return nullcontext() if is_idle else self._around(batch, number)

    @contextmanager
    def _around(self, batch: Batch, number: int) -> Iterator[None]:
        if self._account is None or batch.size < self._size:
            yield
            self._checked()
            return
        self._size = batch.size
        if self._steps == MEASURED_STEPS - 1:
            yield from self._timed()
            self._choose()
        else:
            yield from self._counted(self._account, batch)
            if self._steps >= MEASURED_STEPS:
                self._compare(self._account.peak, number)
        self._steps += 1
        self._checked()

    def _checked(self) -> None:
        self._learner.recomputed.check(self._learner.session.control.gather_objects)

    # Measuring

    def _counted(self, account: Accounting, batch: Batch) -> Iterator[None]:
        learner = self._learner
        with ExitStack() as stack:
            stack.enter_context(account)
            name_model(account, learner)
            name_inputs(account, batch)
            account.reset_peak()
            if self._steps == 1:
                self._seen = Counted(account, self._watch)
                stack.enter_context(learner.recomputed.watched(self._seen))
            yield
            if self._steps == 1:
                self._seen.passed()

    def _timed(self) -> Iterator[None]:
        self._times, whole = Timed(self._watch), self._watch()
        whole.start()
        with self._learner.recomputed.watched(self._times):
            yield
        whole.mark()
        self._seconds: Readout = whole.taken()

    # Choosing

    def _choose(self) -> None:
        own = measured(self._seen, self._times.seconds(), self._seconds.value())
        stage = self._learner.mesh.index("pipeline")
        rows: list[tuple[int, Measured]] = self._learner.session.control.gather_objects((stage, own))
        self._stages, self._ranks = [row[0] for row in rows], [row[1] for row in rows]
        assert self._asked is not None
        self._budgets = self._asked.budgets(
            [rank.kept_peak for rank in self._ranks], [rank.least for rank in self._ranks], self._stages
        )
        self._spending = list(self._budgets)
        if any(rank.least > budget for rank, budget in zip(self._ranks, self._budgets, strict=True)):
            raise ConfigurationError(words.impossible(self._asked, self._ranks, self._budgets))
        self._left = CHOICES
        self._take()

    def _take(self) -> None:
        """The next choice of all ranks: each of them works out that of all stages."""
        self._left -= 1
        self._ways = [self._ways_of(stage) for stage in self._stages]
        own = self._ways[self._learner.session.rank]
        names = self._learner.recomputed.names
        self._learner.recomputed.take({name: own[name].name if name in own else AGAIN for name in names})

    def _ways_of(self, stage: int) -> Mapping[str, Way]:
        """Those of the ranks of a stage."""
        ranks = [rank for rank, other in enumerate(self._stages) if other == stage]
        found = None
        if self._left:
            found = chosen([self._ranks[rank] for rank in ranks], [self._spending[rank] for rank in ranks])
        return found or {name: ways[-1] for rank in ranks for name, ways in self._ranks[rank].blocks.items()}

    def _compare(self, peak: int, number: int) -> None:
        peaks: list[int] = self._learner.session.control.gather_objects(peak)
        over = [max(0, found - budget) for found, budget in zip(peaks, self._budgets, strict=True)]
        if any(over) and self._left:
            self._spending = [budget - more for budget, more in zip(self._spending, over, strict=True)]
            self._take()
            return
        self._account = None
        self._say(peaks)
        self._tell(Note(number, self.words))
        del self._seen, self._times, self._seconds

    def _say(self, peaks: list[int]) -> None:
        most = max(range(len(peaks)), key=peaks.__getitem__)
        by_name: dict[str, Any] = {name: way.name for ways in self._ways for name, way in ways.items()}
        times = max(rank.times(ways) for rank, ways in zip(self._ranks, self._ways, strict=True))
        said = words.of_choice(by_name.values(), peaks[most], self._ranks[most].kept_peak, times)
        over = max(found - budget for found, budget in zip(peaks, self._budgets, strict=True))
        self.words = said + (words.above(over) if over > 0 else "")
