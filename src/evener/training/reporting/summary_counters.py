"""What a run counts of itself for its summary."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from itertools import zip_longest
from operator import gt
from statistics import median
from typing import Any

from evener.core.observer import Observer
from evener.core.records import EvaluationRecord, StepRecord
from evener.hardware.memory import CATEGORIES

WINDOW = 128
"""Steps of which each rank's time for a sample is known."""
_FEW = 5
"""Of so few steps some are not like the others: the first is slow."""


class Tally(Observer):
    """What the summary tells of steps and evaluations."""

    def __init__(self, parts: int, metrics: Iterable[str] = ()) -> None:
        self._asked = sorted(metrics)
        self.taken = [0] * parts
        self.last: StepRecord | None = None
        self.skipped = 0
        self.memory: list[dict[str, int]] = []
        """Of each rank the most bytes in use in a step, and what these were for."""
        self.evaluation_record: EvaluationRecord | None = None
        self._times = [deque[float](maxlen=WINDOW) for _ in range(parts)]
        """Seconds for a sample, of each part."""

    everywhere = True

    def step(self, record: StepRecord) -> None:
        self.last = record
        self.skipped += record.skipped
        known = [each["peak"] for each in self.memory] or [-1] * len(record.memory_peak)
        if any(map(gt, record.memory_peak, known)):
            pairs = zip_longest(self.memory, _memory_of(record), fillvalue={"peak": -1})
            self.memory = [max(pair, key=lambda each: each["peak"]) for pair in pairs]
        if len(record.compute_seconds) == len(record.shares):  # one rank for each part
            for times, seconds, count in zip(self._times, record.compute_seconds, record.shares, strict=True):
                times.extend([seconds / count] if count else [])
        self.taken = [total + share for total, share in zip(self.taken, record.shares, strict=True)]

    def evaluation(self, record: EvaluationRecord) -> None:
        self.evaluation_record = record

    def state_dict(self) -> dict[str, Any]:
        record = self.evaluation_record
        return {} if record is None else {"evaluation": asdict(record), "asked": self._asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """An evaluation by other metrics than the task has now is none."""
        known = state.get("asked") == self._asked
        self.evaluation_record = EvaluationRecord(**state["evaluation"]) if known else None

    def sample_seconds(self) -> list[float]:
        """The median time of each rank's own work for a sample; empty if too few steps have told it.

        A median, because a single pause is no speed.
        """
        return [median(times) for times in self._times] if min(map(len, self._times)) > _FEW else []

    @property
    def samples(self) -> int:
        return sum(self.taken)


def _memory_of(record: StepRecord) -> list[dict[str, int]]:
    """Of each rank."""
    none = (0,) * len(record.memory_peak)
    return [
        {"peak": peak} | {name: record.memory_parts.get(name, none)[rank] for name in CATEGORIES}
        for rank, peak in enumerate(record.memory_peak)
    ]


class Clock:
    """The seconds of training, without what comes between."""

    def __init__(self) -> None:
        self._before = 0.0
        self._began: float | None = None

    def start(self) -> None:
        self._before = self.seconds
        self._began = time.perf_counter()

    def stop(self) -> None:
        self._before, self._began = self.seconds, None

    @property
    def seconds(self) -> float:
        """So far, also while it runs."""
        return self._before + (0.0 if self._began is None else time.perf_counter() - self._began)
