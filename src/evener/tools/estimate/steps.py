"""Takes and counts the steps of an engine, in the same way for an estimate and for a measured run.

The second step is the one that counts. In the first step the optimizer creates its state, which the second and all
further steps have from the beginning. Building model and optimizer is counted separately, as it may need more memory on
rank 0.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

from evener.data.batch import Batch
from evener.hardware.memory import MemoryTracker, made_as
from evener.hardware.memory.counters import OTHER
from evener.strategies.memory_attribution import name_inputs, name_model, updates_named
from evener.tools.estimate.result import RankMemory
from evener.training.engine import Engine

STEPS = 2


class CountedEngine(Engine):
    """An engine that reports its batches to a memory tracker.

    Args:
        account: The active memory tracker.
        reading: Makes a context manager that surrounds the reading of samples.
        read: Maps each batch that was read to the batch that is used.
        ahead: Batches to hold besides those that the engine holds, in place of a loader that would have them on their
            way to the device.
    """

    def __init__(
        self,
        account: MemoryTracker,
        *args: Any,
        reading: Callable[[], AbstractContextManager[Any]] = nullcontext,
        read: Callable[[Batch], Batch] = lambda batch: batch,
        ahead: int = 0,
        **options: Any,
    ) -> None:
        self._account, self._reading_of, self._read = account, reading, read
        self._ahead, self._held = ahead, deque[Batch | None]()
        with made_as(OTHER):
            super().__init__(*args, **options)

    def _next(self, source: Iterator[Batch]) -> Batch | None:
        while len(self._held) <= self._ahead:
            self._held.append(self._named(source))
        return self._held.popleft()

    def _named(self, source: Iterator[Batch]) -> Batch | None:
        with made_as(OTHER):
            with self._reading_of():
                batch = super()._next(source)
            if batch is not None:
                batch = self._read(batch)
                name_inputs(self._account, batch)
            return batch


def count_steps(
    engine: CountedEngine,
    account: MemoryTracker,
    shared: int = 0,
    begin: Callable[[], None] = lambda: None,
) -> tuple[RankMemory, Batch]:
    """Takes steps; returns the memory they needed and the last batch.

    Args:
        shared: Bytes of shared memory that are allocated in addition.
        begin: Called before each step.
    """
    name_model(account, engine.learner)
    setup_peak = account.peak
    with updates_named(account, engine.learner), closing(engine.batches()) as batches:
        for _ in range(STEPS):
            batch = next(batches)
            gc.collect()  # frees what PyTorch left in reference cycles when it chose operators
            account.reset_peak()
            begin()
            engine.step(batch)
        held = account.held  # before the loader closes, and drops the batch that is on its way
    rank, peak, at_peak = engine.session.rank, account.peak, account.at_peak()
    outside = sum(engine.learner.offloaded.peaks.values())
    return RankMemory(rank, peak, at_peak, held, setup_peak, shared, outside), batch
