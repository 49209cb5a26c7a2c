"""The ledger of a section that is repeated on one device: the same gradients, added in the same order.

A section's record says which range merged when, and how old its weights were (`Merges`). One worker computes the ranges
in the order in which they were added, each with the weights of its version, which the server keeps as long as they are
needed. All that a range depends on is in the record: its samples, its weights and buffers, and the random numbers,
which are seeded by its position. So the result is that of the run, to the bit where kernels are the same.
"""

from __future__ import annotations

from evener.errors import DataError
from evener.strategies.asynchronous.ledger import (
    Answer,
    Begun,
    Contribution,
    Lease,
    Ledger,
    Merges,
    Over,
    Terms,
    Wait,
    check_whole,
)


class RecordedLedger(Ledger):
    """The ledger of a section whose merges are known.

    Raises:
        DataError: If they do not hold each sample once, or a range has weights that came after it.
    """

    def __init__(self, size: int, merges: Merges) -> None:
        super().__init__(size, Terms(1, 1, None), [0])
        check_whole(merges, size)
        for number, held in enumerate(merges):
            if any(not 0 <= each.version <= number for each in held):
                raise DataError(f"merge {number} of a section holds a range with weights that came after it")
        self._recorded = merges
        self._order = [(number, each) for number, held in enumerate(merges) for each in held]
        self._next = 0

    def draw(self, worker: int) -> Lease | None:
        return None

    def begin(self, worker: int, number: int | None, now: float) -> Answer:
        if self.is_over:
            return Over()
        merge, next_ = self._order[self._next]
        if merge > self.version:
            return Wait()
        return Begun(Lease(self._next, worker, next_.start, next_.stop), next_.version)

    def push(self, number: int, now: float) -> Contribution:
        self._next += 1
        return self._order[number][1]

    def is_due(self) -> bool:
        return not self.is_over and (
            self._next == len(self._order) or self._order[self._next][0] > self.version
        )

    def merge(self) -> None:
        self._add(self._recorded[self.version])

    def needs(self, version: int) -> bool:
        return any(each.version == version for _, each in self._order[self._next :])
