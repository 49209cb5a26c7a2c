"""Counts what a run reports in its summary."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict
from itertools import accumulate, zip_longest
from operator import gt
from statistics import median
from typing import Any, TypedDict

from evener.balance.time_model import Point, Shape, fit_line
from evener.core.observer import Observer
from evener.core.records import EvaluationRecord, StepRecord
from evener.core.text import counted
from evener.hardware.memory import CATEGORIES

WINDOW = 128
"""Number of steps for which each rank's time per sample is kept."""
_FEW = 5
"""Up to this number of steps, the median is not trusted: some steps are untypical, and the first is slow."""
_APART = 1.3
"""A rank's largest share must be so many times its smallest one, to tell the fixed part of its time."""
_REPEATS = 3
"""Shares that a rank had in fewer steps do not count for that."""
_SIGMA = 0.1
"""Assumed relative standard deviation of the time of a step."""


class CountersRecord(TypedDict):
    """The fields of :class:`~evener.core.records.RunSummary` that the counters know."""

    samples_per_second: float
    samples_in_seconds: int
    final_loss: float
    metrics: dict[str, float]
    cost: float
    sample_seconds: list[float]
    share_lines: list[list[float]]
    memory: list[dict[str, int]]
    skipped: int
    updates_of_server: str
    merge_bytes: int
    late_for_merges: str


class SummaryCounters(Observer):
    """Collects the numbers of steps and evaluations for the summary."""

    def __init__(self, parts: int, metrics: Iterable[str] = ()) -> None:
        self._asked = sorted(metrics)
        self.taken = [0] * parts
        self.costs = [0.0] * parts
        self.last: StepRecord | None = None
        self.skipped = 0
        self.memory: list[dict[str, int]] = []
        """For each rank, the peak of bytes in use in a step, and what they were used for."""
        self.evaluation_record: EvaluationRecord | None = None
        self._ages, self._samples_old, self._of_ranks = Counter[int](), Counter[int](), Counter[int]()
        self._merges = self._wasted = self._quorums = self._merge_bytes = 0
        self._late = Counter[int]()
        """For each rank the merges with a quorum that did not wait for it."""
        self._times = [deque[tuple[int, float]](maxlen=WINDOW) for _ in range(parts)]
        """For each part the samples of its steps, and the seconds of its own work on them."""

    everywhere = True

    def step(self, record: StepRecord) -> None:
        self.last = record
        self.skipped += record.skipped
        self._merges, self._wasted = self._merges + len(record.merges), self._wasted + record.wasted
        self._quorums += len(record.merge_ranks)
        self._merge_bytes += record.merge_bytes
        for ranks in record.merge_ranks:
            self._late.update(set(range(len(self.taken))) - set(ranks))
        merged = [0, *accumulate(sum(stop - start for *_, start, stop in held) for held in record.merges)]
        for number, held in enumerate(record.merges):
            self._ages.update(number - version for _, version, *_ in held)
            self._samples_old.update(merged[number] - merged[version] for _, version, *_ in held)
            self._of_ranks.update(rank for rank, *_ in held)
        known = [each["peak"] for each in self.memory] or [-1] * len(record.memory_peak)
        if any(map(gt, record.memory_peak, known)):
            pairs = zip_longest(self.memory, _memory_of(record), fillvalue={"peak": -1})
            self.memory = [max(pair, key=lambda each: each["peak"]) for pair in pairs]
        if len(record.compute_seconds) == len(record.shares):  # one rank for each part
            for times, seconds, count in zip(self._times, record.compute_seconds, record.shares, strict=True):
                times.extend([(count, seconds)] if count else [])
        self.taken = [total + share for total, share in zip(self.taken, record.shares, strict=True)]
        if record.costs:
            self.costs = [total + cost for total, cost in zip(self.costs, record.costs, strict=True)]

    def evaluation(self, record: EvaluationRecord) -> None:
        self.evaluation_record = record

    def state_dict(self) -> dict[str, Any]:
        record = self.evaluation_record
        return {} if record is None else {"evaluation": asdict(record), "asked": self._asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the last evaluation, unless the task's metrics have changed."""
        known = state.get("asked") == self._asked
        self.evaluation_record = EvaluationRecord(**state["evaluation"]) if known else None

    def sample_seconds(self) -> list[float]:
        """Returns the median seconds of each rank's own work per sample; empty if too few steps are known.

        A median, because a single pause says nothing about speed.
        """
        if min(map(len, self._times)) <= _FEW:
            return []
        return [median(seconds / count for count, seconds in times) for times in self._times]

    def share_lines(self) -> list[list[float]]:
        """Returns for each rank the seconds of its own work in a step that are fixed, and those of a sample; empty if
        the shares of a rank differed too little to tell them apart."""
        points = [_points(times) for times in self._times]
        if any(not each or each[-1].n < _APART * each[0].n for each in points):
            return []
        lines = [fit_line(each, _SIGMA, Shape()).line for each in points]
        return [[line.overhead_seconds, line.seconds_per_sample] for line in lines]

    def fractions(self) -> list[float]:
        """Returns the fraction of all samples that were of each part."""
        samples = sum(self.taken)
        return [count / samples if samples else 0.0 for count in self.taken]

    def cost_fractions(self) -> list[float]:
        """Returns the fraction of the cost of all samples that was of each part; empty without costs."""
        return [cost / sum(self.costs) for cost in self.costs if sum(self.costs)]

    def describe(self, seconds: float) -> CountersRecord:
        """Returns what the summary says of steps and evaluations, for ``seconds`` of training."""
        samples, evaluated = sum(self.taken), self.evaluation_record
        return {
            "samples_per_second": samples / seconds if seconds else 0.0,
            "samples_in_seconds": samples,
            "final_loss": self.last.loss if self.last else math.nan,
            "metrics": evaluated.metrics if evaluated else {},
            "cost": sum(self.costs),
            "sample_seconds": self.sample_seconds(),
            "share_lines": self.share_lines(),
            "memory": self.memory,
            "skipped": self.skipped,
            "updates_of_server": self._updates_of_server(),
            "merge_bytes": self._merge_bytes,
            "late_for_merges": self._late_for_merges(),
        }

    def _late_for_merges(self) -> str:
        """Describes the merges with a quorum that did not have all ranks; "" if there were none."""
        if not self._late:
            return ""
        ranks = ", ".join(f"rank {rank} {number:,}" for rank, number in sorted(self._late.items()))
        return (
            f"of {self._quorums:,} merges with a quorum these came too late for: {ranks}; they merged later"
        )

    def _updates_of_server(self) -> str:
        """Describes the updates of asynchronous training; "" if there were none."""
        if not self._merges:
            return ""
        mean = sum(age * number for age, number in self._ages.items()) / self._ages.total()
        again = f"; {counted(self._wasted, 'sample')} computed again" if self._wasted else ""
        return (
            f"each sample in one of {counted(self._merges, 'update')}; gradients {mean:.1f} versions old on average, "
            f"at most {max(self._ages)}{again}\n"
            f"gradients of each rank: {' + '.join(str(self._of_ranks[rank]) for rank in range(len(self.taken)))}; "
            f"versions old: {_histogram(self._ages)}; samples old: {_histogram(self._samples_old)}"
        )


def _histogram(ages: Counter[int]) -> str:
    """Describes how many gradients have which age: 0, 1, 2 to 3, 4 to 7 and so on."""
    bins = Counter[int]()
    for age, number in ages.items():
        bins[age.bit_length()] += number
    ends = {power: (2**power // 2, 2**power - 1) for power in sorted(bins)}
    return ", ".join(
        f"{least if least == most else f'{least}-{most}'} {bins[power] / bins.total():.0%}"
        for power, (least, most) in ends.items()
    )


def _memory_of(record: StepRecord) -> list[dict[str, int]]:
    """Returns the memory use of each rank."""
    none = (0,) * len(record.memory_peak)
    return [
        {"peak": peak} | {name: record.memory_parts.get(name, none)[rank] for name in CATEGORIES}
        for rank, peak in enumerate(record.memory_peak)
    ]


class Clock:
    """Measures the seconds of training, without what happens in between."""

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
        """Seconds so far, also while the clock runs."""
        return self._before + (0.0 if self._began is None else time.perf_counter() - self._began)


def _points(times: Iterable[tuple[int, float]]) -> list[Point]:
    """Returns the median seconds of each share that was seen often enough, the smallest share first."""
    seen: dict[int, list[float]] = {}
    for count, seconds in times:
        seen.setdefault(count, []).append(seconds)
    return [
        Point(count, median(took), len(took), 0)
        for count, took in sorted(seen.items())
        if len(took) >= _REPEATS
    ]
