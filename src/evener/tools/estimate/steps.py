"""Steps of an engine, counted: the same for a run that is measured and for one that is estimated.

The second step tells all: in the first the optimizer makes its state, and the second has it from the beginning, as have
all further ones. Building model and optimizer is counted apart, for on rank 0 it may take more.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

from evener.data.batch import Batch
from evener.hardware.memory import Accounting, made_as
from evener.hardware.memory.counters import OTHER
from evener.strategies.memory_attribution import name_inputs, name_model, updates_named
from evener.tools.estimate.result import RankMemory
from evener.training.engine import Engine

STEPS = 2


class CountedEngine(Engine):
    """An engine whose batches are named to an accounting as they come.

    Args:
        account: Which is counting.
        reading: Around the reading of samples.
        read: What becomes of a batch that was read.
    """

    def __init__(
        self,
        account: Accounting,
        *args: Any,
        reading: Callable[[], AbstractContextManager[Any]] = nullcontext,
        read: Callable[[Batch], Batch] = lambda batch: batch,
        **options: Any,
    ) -> None:
        self._account, self._reading_of, self._read = account, reading, read
        with made_as(OTHER):
            super().__init__(*args, **options)

    def _next(self, source: Iterator[Batch]) -> Batch | None:
        with made_as(OTHER):
            with self._reading_of():
                batch = super()._next(source)
            if batch is not None:
                batch = self._read(batch)
                name_inputs(self._account, batch)
            return batch


def count_steps(engine: CountedEngine, account: Accounting, shared: int = 0) -> tuple[RankMemory, Batch]:
    """Takes steps, and says what they took; with the last batch.

    Args:
        shared: Bytes of shared memory that are made besides.
    """
    name_model(account, engine.learner)
    setup_peak = account.peak
    with updates_named(account, engine.learner), closing(engine.batches()) as batches:
        for _ in range(STEPS):
            batch = next(batches)
            gc.collect()  # what PyTorch needed once, to choose operators, and has left in cycles
            account.reset_peak()
            engine.step(batch)
    rank, peak, at_peak = engine.session.rank, account.peak, account.at_peak()
    outside = sum(engine.learner.offloaded.peaks.values())
    return RankMemory(rank, peak, at_peak, account.held, setup_peak, shared, outside), batch
