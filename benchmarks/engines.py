"""Engines with different settings that take their steps in turns, and the peak of a step, counted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from benchmarks.interleaved import Timing
from evener.core.task.task import Task
from evener.hardware.memory import MemoryTracker
from evener.strategies.memory_attribution import name_inputs, name_model
from evener.training.engine import Engine

WARM_UP = 5


class Contender:
    """An engine of one rank that takes steps when it is its turn."""

    def __init__(self, task: Task, **settings: Any) -> None:
        self.engine = Engine(task, device="cpu", strategy="single", epochs=10**6, **settings)
        self._batches = self.engine.batches()
        self.seconds(WARM_UP)

    def seconds(self, steps: int) -> float:
        """Of a step."""
        began = time.perf_counter()
        for _ in range(steps):
            self.engine.step(next(self._batches))
        return (time.perf_counter() - began) / steps

    def peak(self) -> int:
        """Bytes, in one further step, by an accounting that sees all tensors."""
        batch = next(self._batches)
        with MemoryTracker() as account:
            name_model(account, self.engine.learner)
            name_inputs(account, batch)
            account.reset_peak()
            self.engine.step(batch)
        return account.peak

    def close(self) -> None:
        self._batches.close()
        self.engine.close()


def in_turns(contenders: Mapping[str, Contender], turns: int, steps: int) -> dict[str, Timing]:
    """The seconds of a step of each, turn by turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, each in contenders.items():
            seconds[name].append(each.seconds(steps))
    return {name: Timing(found) for name, found in seconds.items()}
