"""Chooses the blocks to checkpoint for a memory budget: the first of the model, as few as possible, alike in a stage.

::

    step 0    1          2             3 ...
         ┌─ all blocks ──┐
         count   count,  ▲ count       nobody looks on any more, once a step fits
         what is blocks  │ and compare
         made    watched choice, by all ranks

Memory is counted from the first step on, which allocates buckets and the optimizer state. The steps after the choice
are counted too. If one is over the budget, more blocks are checkpointed, until a step fits. A step with fewer samples
than an earlier one, such as the last of an epoch, is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from evener.components.activation_checkpoint.profiling import Counted, fewest
from evener.core.config.recompute import Recompute
from evener.core.config.sizes import size_words
from evener.core.records import Note
from evener.data.batch import Batch
from evener.errors import ConfigurationError
from evener.hardware.memory import MemoryTracker
from evener.strategies.learner import Learner
from evener.strategies.memory_attribution import name_inputs, name_model

MEASURED_STEPS = 2
_NOTHING: AbstractContextManager[None] = nullcontext()


class Recomputing:
    """Applies the setting ``recompute`` to a learner's model, from the first step on.

    Args:
        tell: Receives a record of the choice, on all ranks.
    """

    def __init__(self, learner: Learner, tell: Callable[[Note], object]) -> None:
        self._learner, self._tell = learner, tell
        self._asked = learner.settings.recompute
        self._steps = self._size = 0
        self._tracker: MemoryTracker | None = None
        if self._asked is not None and self._asked.is_budget:
            self._tracker = MemoryTracker(device_type=learner.session.device.type)
        self.description = "" if self._asked is None else _before(self._asked, len(learner.recomputed.names))
        """A message for the user about the current state; empty without ``recompute``."""

    def step(self, batch: Batch, number: int) -> AbstractContextManager[None]:
        """Returns a context for one step. All ranks must enter it together: steps may end with collective calls.

        Raises:
            ConfigurationError: On all ranks, if the budget cannot be met or no block was called.
        """
        return _NOTHING if self._asked is None else self._around(batch, number)

    @contextmanager
    def _around(self, batch: Batch, number: int) -> Iterator[None]:
        if self._tracker is None or batch.size < self._size:
            yield
        else:
            yield from self._counted(self._tracker, batch)
            self._size, self._steps = batch.size, self._steps + 1
            if self._steps == MEASURED_STEPS:
                self._choose()
            elif self._steps > MEASURED_STEPS:
                self._compare(self._tracker.peak, number)
        self._learner.recomputed.check(self._learner.session.control.gather_objects)

    def _counted(self, tracker: MemoryTracker, batch: Batch) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(tracker)
            name_model(tracker, self._learner)
            name_inputs(tracker, batch)
            tracker.reset_peak()
            if self._steps != MEASURED_STEPS - 1:
                yield
                return
            self._seen = Counted(tracker)
            stack.enter_context(self._learner.recomputed.watched(self._seen))
            yield
            self._seen.passed()

    def _choose(self) -> None:
        """Chooses blocks for the budget. All ranks must call this together.

        Ranks of the same stage choose the same number of blocks, because a recomputation may communicate.
        """
        learner, stage = self._learner, self._learner.mesh.index("pipeline")
        called: list[tuple[int, set[str]]] = learner.session.control.gather_objects((stage, self._seen.names))
        self._stages = [other for other, _ in called]
        together = set[str]().union(*(names for other, names in called if other == stage))
        self._names = [name for name in learner.recomputed.names if name in together]
        self._peaks: list[list[int]] = learner.session.control.gather_objects(self._seen.peaks(self._names))
        del self._seen
        assert self._asked is not None
        self._budgets = self._asked.budgets(
            [peaks[0] for peaks in self._peaks], [peaks[-1] for peaks in self._peaks], self._stages
        )
        if any(peaks[-1] > budget for peaks, budget in zip(self._peaks, self._budgets, strict=True)):
            raise ConfigurationError(_impossible(self._asked, self._peaks, self._budgets))
        self._rooms, self._counts = self._budgets, [0] * len(self._budgets)
        self._take([0] * len(self._budgets))

    def _take(self, over: Sequence[int]) -> bool:
        """Checkpoints as few blocks as fit. Returns True if the number changed on any rank.

        Args:
            over: Bytes by which each rank exceeded its budget. Such a rank gets more blocks than before.
        """
        self._rooms = [room - more for room, more in zip(self._rooms, over, strict=True)]
        wanted = [
            max(count + (more > 0), fewest(peaks, room))
            for count, more, peaks, room in zip(self._counts, over, self._peaks, self._rooms, strict=True)
        ]
        before = self._counts
        self._counts = [
            min(
                len(peaks) - 1,
                max(n for n, other in zip(wanted, self._stages, strict=True) if other == stage),
            )
            for peaks, stage in zip(self._peaks, self._stages, strict=True)
        ]
        self._learner.recomputed.keep(self._names[self._counts[self._learner.session.rank] :])
        return self._counts != before

    def _compare(self, peak: int, number: int) -> None:
        peaks: list[int] = self._learner.session.control.gather_objects(peak)
        over = [max(0, found - budget) for found, budget in zip(peaks, self._budgets, strict=True)]
        if any(over) and self._take(over):
            return
        self._tracker = None
        self.description = self._said(peaks, max(over))
        self._tell(Note(number, self.description))

    def _said(self, found: Sequence[int], over: int) -> str:
        """Returns a message about the choice and the measured peaks.

        Args:
            found: The peak of each rank in bytes.
            over: Bytes above the budget if no more blocks could be checkpointed, else 0.
        """
        assert self._asked is not None
        blocks = {stage: len(peaks) - 1 for stage, peaks in zip(self._stages, self._peaks, strict=True)}
        again = dict(zip(self._stages, self._counts, strict=True))
        most = max(range(len(found)), key=found.__getitem__)
        said = (
            f"recomputes {sum(again.values())} of {sum(blocks.values())} blocks in backward, as few as "
            f"{self._asked.text} allows: {size_words(found[most])} instead of {size_words(self._peaks[most][0])}"
        )
        if not over:
            return said
        return (
            f"{said}; this step had more samples or longer ones than those measured, and took {size_words(over)} too "
            "much"
        )


def _before(asked: Recompute, blocks: int) -> str:
    """Returns the message for the start of a run."""
    if not asked.is_budget:
        return f"recomputes all {blocks} blocks in backward"
    return (
        f"recomputes all {blocks} blocks in backward while they are measured, {MEASURED_STEPS} steps, then as few as "
        f"{asked.text} allows"
    )


def _impossible(asked: Recompute, ranks: Sequence[Sequence[int]], budgets: Sequence[int]) -> str:
    """Returns the error message for a budget that cannot be met."""
    rank = max(range(len(ranks)), key=lambda each: ranks[each][-1] - budgets[each])
    peaks = ranks[rank]
    return (
        f"recompute={asked.text} gives rank {rank} {size_words(budgets[rank])}, and a step takes "
        f"{size_words(peaks[-1])} at least, with all {len(peaks) - 1} blocks computed again ({size_words(peaks[0])} "
        "with none): raise the budget, use a smaller micro_batch, a strategy that divides the model such as sharded, "
        "or precision bf16"
    )
