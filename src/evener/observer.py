"""Who is told of a run: the records on disk, the terminal, and whatever the user adds.

Observers are told outside of the time that is measured, and of a step when its results are known, which is a step
late. One of the user's own derives from :class:`Observer` and is given to ``fit`` or ``Engine``.
"""

from __future__ import annotations

from typing import Any

from evener.records import EvaluationRecord, RunStart, RunSummary, StepRecord


class Observer:
    """Told of start, steps, evaluations, events and end; derive and write what you want to hear of.

    It is told on rank 0 alone, or with ``everywhere`` on every rank. To reach the ranks it has to be picklable, so that
    files are opened in ``start``. What it raises ends the run.
    """

    everywhere: bool = False

    def start(self, run: RunStart) -> None:
        """Everything has been set up and the first step is about to be taken."""

    def step(self, record: StepRecord) -> None:
        """A step was taken, and all ranks have told of it."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """The model was evaluated."""

    def event(self, record: Any) -> None:
        """Something else: a record with ``words``, such as a change of shares."""

    def end(self, summary: RunSummary | None) -> None:
        """The run has ended; ``summary`` is None after an error. Files are closed here."""


class Observers(Observer):
    """Tells several, in their order; those that are on one rank alone only there."""

    def __init__(self, observers: list[Observer], rank: int) -> None:
        self._rank = rank
        self._told: list[Observer] = []
        self._started: list[Observer] = []
        for each in observers:
            self.add(each)

    def add(self, observer: Observer) -> None:
        """One more."""
        if self._rank == 0 or observer.everywhere:
            self._told.append(observer)

    @property
    def are_some(self) -> bool:
        """Whether anybody on this rank is told."""
        return bool(self._told)

    def start(self, run: RunStart) -> None:
        for each in self._told:
            each.start(run)
            self._started.append(each)

    def step(self, record: StepRecord) -> None:
        for each in self._told:
            each.step(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        for each in self._told:
            each.evaluation(record)

    def event(self, record: Any) -> None:
        for each in self._told:
            each.event(record)

    def end(self, summary: RunSummary | None) -> None:
        """Only those that have started: where one could not, as for want of room on a disk, those behind it did not."""
        for each in self._started:
            each.end(summary)
