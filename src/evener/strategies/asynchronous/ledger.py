"""The ledger of a section: which worker computes which samples, and which merge holds them.

A section is a stretch of the global order that workers compute at their own pace. A worker *leases* a range of it,
reads the weights, computes, and pushes gradients. Pushed gradients are *pending* until they merge, which makes the next
*version* of the weights. A section has as many versions as buffers, of about equal size. Version number ``n`` is due
when about ``n`` times that size has been pushed, at least half of it is pending, and half of it or nothing is left::

    free ──draw──▶ leased ──begin──▶ begun at version v ──push──▶ pending ──merge──▶ merged: version v + 1, v + 2 ...
      ▲               │                  │                  │
      └───────────────┴── worker lost, ──┴── or too old ────┘
                          late or slow

A sample counts when the merge that holds it is done, so a worker's death loses none: what it leased is free again. The
ledger is complete if the merged ranges are the section and no two overlap.

The bound on staleness is one in versions: gradients that were computed with weights more than ``staleness`` versions
old do not merge, and their range is free again. A range that begins ``staleness + 1`` buffers after the merged ones is
not begun yet. So with a staleness of 0 every merge holds one batch, computed with the weights of the merge before it,
which is synchronous training; and with a larger one nobody waits for a slow worker, which gets smaller ranges instead.

Everything here is decided by the calls and the times that they pass: there is no clock and no communication.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from evener.errors import DataError

LATE = 4.0
"""A lease is late after this multiple of the time that its worker usually takes."""
LEAST_LATE_SECONDS = 1.0
"""No lease is late before that time."""
SMOOTHING = 0.3
"""The weight of the last measurement in a worker's speed."""
NEARLY = 0.9
"""The part of the last such size that must have been pushed, for ranges do not end where versions would."""
SMALLEST = 0.25
"""The smallest range near the end of a section, as a part of the usual one."""


@dataclass(frozen=True)
class Lease:
    """A range of a section that a worker computes. Positions count from the start of the section."""

    number: int
    worker: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of samples."""
        return self.stop - self.start


@dataclass(frozen=True)
class Contribution:
    """A range in a merge: who has computed it, and with which version of the weights."""

    worker: int
    version: int
    """The number of merges of the section before its weights."""
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of samples."""
        return self.stop - self.start


Merges = tuple[tuple[Contribution, ...], ...]
"""The merges of a section in their order, each with its contributions in the order in which they were added."""


@dataclass(frozen=True)
class Begun:
    """The answer to a worker that wants to compute: a lease, and the version of the weights that it gets."""

    lease: Lease
    version: int


@dataclass(frozen=True)
class Wait:
    """The worker has to wait: for a merge, or for a range to be free."""


@dataclass(frozen=True)
class Revoked:
    """The range that the worker has read is not leased to it any more."""


@dataclass(frozen=True)
class Over:
    """All samples of the section have merged."""


Answer = Begun | Wait | Revoked | Over


@dataclass
class _Open:
    """A lease that has not been pushed."""

    lease: Lease
    version: int | None = None
    since: float = 0.0


@dataclass
class _Worker:
    """What is known of a worker."""

    seconds: float = math.nan
    """Its seconds for a sample; NaN before the first measurement."""
    most: int = 2**31
    """The largest range that it gets, after gradients that were too old."""


@dataclass(frozen=True)
class Terms:
    """The rules of asynchronous training."""

    batch_size: int
    """The number of samples that all workers together lease at about the same time."""
    buffer: int
    """A section has a merge for so many samples or fewer. If every merge had at least so many, there would be fewer
    merges than synchronous training has batches."""
    staleness: int | None
    """The largest age of gradients in a merge, in versions. None means no bound."""
    damping: float = 0.0
    """Gradients and their terms weigh (1 + age) ** -damping in a merge, with their age in versions."""
    delayed: int = 0
    """The number of merges in which the optimizer's momentum changes once. 0 means that it changes in each."""


@dataclass
class Ledger:
    """The ledger of one section.

    Args:
        size: The number of samples in the section.
        workers: The workers at the start.
        seconds: Each worker's seconds for a sample in an earlier section, where known.
        before: The merges that the section has had already, if it was interrupted.
    """

    size: int
    terms: Terms
    workers: Iterable[int]
    seconds: dict[int, float] = field(default_factory=dict)
    before: Merges = ()
    version: int = 0
    """The number of merges so far."""
    merged: int = 0
    """The number of samples that have merged."""
    wasted: int = 0
    """The number of samples whose gradients were computed and did not merge."""

    def __post_init__(self) -> None:
        self._workers = {worker: _Worker(self.seconds.get(worker, math.nan)) for worker in self.workers}
        self.version, self.merged = len(self.before), sum(each.size for held in self.before for each in held)
        self._free = _rest(self.before, self.size)
        self._open: dict[int, _Open] = {}
        self._revoked: dict[int, _Open] = {}  # begun, so that their workers' speed is known when they push
        self._pending: list[Contribution] = []
        self._merges = list(self.before)
        self._leases = 0
        self._stride = max(self.terms.buffer, math.ceil(self.terms.batch_size / max(1, len(self._workers))))

    # A worker's calls

    def draw(self, worker: int) -> Lease | None:
        """Leases the next free range to a worker, which may read it before it begins. None if no range is free."""
        if not self._free:
            return None
        start, stop = heapq.heappop(self._free)
        edge = stop
        if self.terms.staleness == 0:  # no range crosses the edge of a merge
            edge = min(stop, (start // self._stride + 1) * self._stride)
        usual, least = self._usual(worker, stop - start)
        middle = start + usual if edge - start - usual >= least else edge
        if middle < stop:
            heapq.heappush(self._free, (middle, stop))
        lease = Lease(self._leases, worker, start, middle)
        self._leases += 1
        self._open[lease.number] = _Open(lease)
        return lease

    def begin(self, worker: int, number: int | None, now: float) -> Answer:
        """Answers a worker that wants to compute.

        Args:
            number: The lease whose samples it has read. None to lease a range and begin it at once.
            now: The time in seconds, for the worker's speed.
        """
        if self.merged == self.size:
            return Over()
        if number is None:
            if not self._finds(now):
                return Wait()
            drawn = self.draw(worker)
            assert drawn is not None
            number = drawn.number
        found = self._open.get(number)
        if found is None:
            return Revoked()
        if not self._may_begin(found.lease.start):
            if not self._finds(now):
                return Wait()
            self._give_back(number)  # something before it must merge first
            return Revoked()
        found.version, found.since = self.version, now
        return Begun(found.lease, self.version)

    def push(self, number: int, now: float) -> Contribution | None:
        """Takes a worker's gradients of a lease. Returns None if they do not count."""
        found = self._open.get(number) or self._revoked.pop(number, None)
        worker = None if found is None else self._workers.get(found.lease.worker)
        if found is None or found.version is None or worker is None:
            return None
        lease = found.lease
        seconds = max(now - found.since, 1e-9) / lease.size
        before = seconds if math.isnan(worker.seconds) else worker.seconds
        worker.seconds = before + SMOOTHING * (seconds - before)
        if number not in self._open:
            return None
        age = self.version - found.version
        if self.terms.staleness is not None and age > self.terms.staleness:
            worker.most = lease.size // 2
            self._give_back(number)
            return None
        worker.most = min(2**31, worker.most * 2)
        del self._open[number]
        self._pending.append(Contribution(lease.worker, found.version, lease.start, lease.stop))
        return self._pending[-1]

    def is_due(self) -> bool:
        """Returns True if the pending gradients merge now."""
        pending, buffer = sum(each.size for each in self._pending), self.terms.buffer
        rest = self.size - self.merged - pending
        if not rest or self.terms.staleness == 0:
            return pending >= min(buffer, pending + rest) > 0
        usual = self.size / math.ceil(self.size / buffer)
        if 2 * rest < usual and self._may_begin(self.size - 1):
            return False  # it merges with the rest
        return self.merged + pending >= (self.version + NEARLY) * usual and 2 * pending >= usual

    def merge(self) -> None:
        """Makes the next version of the pending gradients, in the order in which they came."""
        self._add(tuple(self._pending))
        self._pending.clear()

    def _add(self, held: tuple[Contribution, ...]) -> None:
        self._merges.append(held)
        self.version += 1
        self.merged += sum(each.size for each in held)

    def shorten(self) -> bool:
        """Ends the section after the batch of the last sample that a worker has begun to compute.

        Returns:
            False if nothing has begun, so that the section is as long as before.
        """
        for number in [number for number, each in self._open.items() if each.version is None]:
            self._give_back(number)
        begun = [each.lease.stop for each in self._open.values()] + [each.stop for each in self._pending]
        begun += [each.stop for held in self._merges for each in held]
        if not begun:
            return False
        batch = self.terms.batch_size
        self.size = min(self.size, -(-max(begun) // batch) * batch)
        self._free = [(start, min(stop, self.size)) for start, stop in self._free if start < self.size]
        heapq.heapify(self._free)
        return True

    def lose(self, worker: int) -> None:
        """Removes a worker that is gone. What it has leased and not pushed is free again."""
        self._workers.pop(worker, None)
        for number in [number for number, each in self._open.items() if each.lease.worker == worker]:
            self._give_back(number)

    # What is known

    def needs(self, version: int) -> bool:
        """Returns True if a range will begin with the weights of ``version`` when they are not the last ones."""
        return False

    def holders(self) -> str:
        """Returns a text that says who holds the samples that have not merged."""
        held = sorted((each.lease.worker, each.lease.start, each.lease.stop) for each in self._open.values())
        return "; ".join(
            f"rank {worker} holds: {start} to {stop - 1} of the section" for worker, start, stop in held
        )

    @property
    def is_over(self) -> bool:
        """True if all samples have merged."""
        return self.merged == self.size

    @property
    def merges(self) -> Merges:
        """The merges so far."""
        return tuple(self._merges)

    @property
    def speeds(self) -> dict[int, float]:
        """Each worker's seconds for a sample, where known."""
        return {index: each.seconds for index, each in self._workers.items() if not math.isnan(each.seconds)}

    # Decisions

    def _may_begin(self, start: int) -> bool:
        staleness = self.terms.staleness
        return staleness is None or start < self.merged + (staleness + 1) * self._stride

    def _usual(self, worker: int, left: int) -> tuple[int, int]:
        """Returns the number of samples to lease, and the smallest number that is left to others.

        It is in proportion to the worker's speed, and less near the end. BatchNorm needs more than one sample.
        """
        rates = {index: 1 / each.seconds for index, each in self._workers.items() if each.seconds > 0}
        mean = sum(rates.values()) / len(rates) if rates else 1.0
        whole = sum(rates.get(index, mean) for index in self._workers) or 1.0
        share = rates.get(worker, mean) / whole
        usual = max(1, round(self.terms.batch_size * share))
        unread = sum(stop - start for start, stop in self._free) + left
        least = min(self.terms.batch_size, max(2, math.ceil(usual * SMALLEST)))
        return max(least, min(usual, self._workers[worker].most, math.ceil(unread * share))), least

    def _finds(self, now: float) -> bool:
        """Returns True if there is a free range that a waiting worker may begin. If need be one is taken away from a
        worker that has not begun it, or that is late."""
        if self._free and self._may_begin(self._free[0][0]):
            return True
        unbegun = [
            each for each in self._open.values() if each.version is None and self._may_begin(each.lease.start)
        ]
        late = [each for each in self._open.values() if each.version is not None and self._is_late(each, now)]
        if unbegun:
            self._give_back(max(unbegun, key=lambda each: each.lease.start).lease.number)
        elif late:
            self._give_back(min(late, key=lambda each: each.since).lease.number)
        return bool(unbegun or late)

    def _is_late(self, found: _Open, now: float) -> bool:
        known = self.speeds
        seconds = known.get(found.lease.worker, max(known.values(), default=math.inf))
        return now - found.since > max(LEAST_LATE_SECONDS, LATE * seconds * found.lease.size)

    def _give_back(self, number: int) -> None:
        found = self._open.pop(number)
        if found.version is not None:
            self.wasted += found.lease.size
            self._revoked[number] = found
        heapq.heappush(self._free, (found.lease.start, found.lease.stop))


def _rest(merges: Merges, size: int) -> list[tuple[int, int]]:
    """Returns the ranges of a section that have not merged."""
    ranges = sorted((each.start, each.stop) for held in merges for each in held)
    edges = [(0, 0), *ranges, (size, size)]
    return [(before, after) for (_, before), (after, _) in pairwise(edges) if before < after]


def check_whole(merges: Sequence[Sequence[Contribution]], size: int) -> None:
    """Checks that the merges hold each of a section's samples once.

    Raises:
        DataError: If a sample is missing or in two merges.
    """
    ranges = sorted((each.start, each.stop) for held in merges for each in held)
    edges = [(0, 0), *ranges, (size, size)]
    for (_, before), (after, _) in pairwise(edges):
        if before != after:
            what = (
                f"samples {before} to {after - 1} are in none"
                if after > before
                else f"sample {after} is in two"
            )
            raise DataError(
                f"the merges of this section of {size} samples do not hold each sample once: {what}"
            )


def ages(merges: Sequence[Sequence[Contribution]]) -> list[int]:
    """Returns the age of every contribution in versions: the number of merges between its weights and its merge."""
    return [number - each.version for number, held in enumerate(merges) for each in held]
