"""Tells which rank is slow: where the ranks' time went in the last steps, in a few words.

In a synchronous step all ranks end together. So ranks differ only in the time of their own work and of waiting for
their samples before it. The slowest sets the pace, and the others wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import add
from statistics import fmean

from evener.core.records import StepRecord

WINDOW = 20
"""Number of steps that are averaged."""
_HARDLY = 0.05
SHOWN = 8
"""Maximum number of ranks that are shown one by one."""


class RecentSteps:
    """Means over the last steps.

    Args:
        parts: For each rank, the index of the part of a batch that it computes. If empty, each rank has its own part.
    """

    def __init__(self, parts: Sequence[int] = ()) -> None:
        self._parts = parts
        self._records: deque[StepRecord] = deque(maxlen=WINDOW)

    def add(self, record: StepRecord) -> None:
        """Adds a step. With many ranks, some steps do not have the times of each rank, and are ignored."""
        if record.compute_seconds:
            self._records.append(record)

    @property
    def several(self) -> bool:
        """True if there are ranks to compare."""
        return bool(self._records) and len(self._records[-1].compute_seconds) > 1

    def slowest(self) -> str:
        """Returns ``rank 1 slowest, others wait 34%`` (mean part of its time), or that no rank is slow."""
        busy = self._busy()
        rank = max(range(len(busy)), key=busy.__getitem__)
        waiting = 1 - fmean(busy[:rank] + busy[rank + 1 :]) / (busy[rank] or 1.0)
        if waiting < _HARDLY:
            return "no rank is slow"
        reads = self._means("input_seconds")[rank] > busy[rank] / 2
        return f"rank {rank} slowest{' (waits for samples)' * reads}, others wait {waiting:.0%}"

    def each(self) -> str:
        """Returns one entry for each rank or, with many ranks, for those that work longest and shortest."""
        work, wait = self._means("compute_seconds"), self._means("wait_seconds")
        load, shares = self._means("input_seconds"), self._means("shares")
        part, whole = self._parts or range(len(work)), sum(shares)
        entries = [
            f"{rank}: {shares[part[rank]] / whole:.0%} {_ms(work[rank])}+{_ms(wait[rank])}+{_ms(load[rank])}"
            for rank in _chosen(self._busy())
        ]
        return f"{self.slowest()} | rank: share work+wait+input ms | " + " | ".join(entries)

    def _busy(self) -> list[float]:
        """Returns the seconds for which others may have to wait for each rank."""
        return list(map(add, self._means("compute_seconds"), self._means("input_seconds")))

    def _means(self, name: str) -> list[float]:
        return [fmean(column) for column in zip(*(getattr(r, name) for r in self._records), strict=True)]


def _chosen(busy: list[float]) -> list[int]:
    order = sorted(range(len(busy)), key=busy.__getitem__)
    few = order if len(busy) <= SHOWN else order[: SHOWN // 2] + order[-SHOWN // 2 :]
    return sorted(few)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
