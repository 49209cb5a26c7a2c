"""Who is told of a run: the records on disk, the terminal, and whatever the user adds.

Observers are told outside of the time that is measured, and of a step when its results are known, which is a step
late. One of the user's own derives from :class:`Observer` and is given to ``fit`` or ``Engine``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from evener.core.records import EvaluationRecord, RunStart, RunSummary, StepRecord
from evener.errors import EvenerError


class Observer:
    """Told of start, steps, evaluations, events and end; derive and write what you want to hear of.

    It is told on rank 0 alone, or with ``everywhere`` on every rank. To reach the ranks it has to be picklable, so that
    files are opened in ``start``. What it raises ends the run.
    """

    everywhere: bool = False
    ends_because: str = ""
    """Set to the reason, it ends the run as if it were complete. All ranks stop after the same step: after an
    evaluation at an epoch's end at once, else some steps after the one that it was told of."""

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

    def state_dict(self) -> dict[str, Any]:
        """What the observer remembers of the run, as JSON can hold it; checkpoints keep it. Empty if nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what :meth:`state_dict` gave, after ``start``; called where a run goes on from a checkpoint."""


class Observers(Observer):
    """Tells several, in their order; those that are on one rank alone only there."""

    def __init__(self, observers: list[Observer], rank: int) -> None:
        self.ended = False
        """Whether all ranks have agreed to take no further step."""
        self._rank = rank
        self._told: list[Observer] = []
        self._started: list[Observer] = []
        self._loaded: dict[str, dict[str, Any]] = {}
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

    @property
    def ending(self) -> str:
        """Who wants the run to end, and why; empty if nobody of this rank does."""
        return next((f"{_name(each)}: {each.ends_because}" for each in self._told if each.ends_because), "")

    def start(self, run: RunStart) -> None:
        for each in self._told:
            with _named(each, "at the start"):
                each.start(run)
            self._started.append(each)
        self.load_state_dict(self._loaded)  # once more: a start begins anew
        self._loaded = {}

    def step(self, record: StepRecord) -> None:
        for each in self._told:
            try:  # not _named, which would cost microseconds of every step
                each.step(record)
            except Exception as error:
                _add_name(error, each, f"of step {record.step}")
                raise

    def evaluation(self, record: EvaluationRecord) -> None:
        for each in self._told:
            with _named(each, f"of the evaluation after {record.step} steps"):
                each.evaluation(record)

    def event(self, record: Any) -> None:
        for each in self._told:
            with _named(each, f"of an event at step {record.step}"):
                each.event(record)

    def end(self, summary: RunSummary | None) -> None:
        """Only those that have started: where one could not, as for want of room on a disk, those behind it did not.

        All of them end, whatever one of them raises; the first error is raised then.
        """
        errors: list[Exception] = []
        for each in self._started:
            try:
                with _named(each, "at the end"):
                    each.end(summary)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def state_dict(self) -> dict[str, Any]:
        """What each remembers, by its class."""
        own = [(label, each) for label, each in self._labelled() if _remembers(each)]
        return {label: each.state_dict() for label, each in own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state
        for label, each in self._labelled():
            if label in state:
                with _named(each, "of what it remembered"):
                    each.load_state_dict(state[label])

    def _labelled(self) -> Iterator[tuple[str, Observer]]:
        """Several of a class have numbers, in their order."""
        counts: Counter[str] = Counter()
        for each in self._told:
            kind = f"{type(each).__module__}.{type(each).__qualname__}"
            yield f"{kind} {counts[kind]}", each
            counts[kind] += 1


def _remembers(observer: Observer) -> bool:
    return type(observer).state_dict is not Observer.state_dict


@contextmanager
def _named(observer: Observer, when: str) -> Iterator[None]:
    """An error in it says whose it is."""
    try:
        yield
    except Exception as error:
        _add_name(error, observer, when)
        raise


def _add_name(error: Exception, observer: Observer, when: str) -> None:
    """The run's own errors say it all; of others the traceback ends with the note."""
    if not isinstance(error, EvenerError):
        error.add_note(f"raised by the observer {_name(observer)}, told {when}")


def _name(observer: Observer) -> str:
    return type(observer).__name__
