"""Observers of a run: the record file, the terminal output, and user-defined observers.

Observers are called outside of the measured time. They receive the record of a step when its results are known, which
is one step later. A user-defined observer derives from :class:`Observer` and is passed to ``fit`` or ``Engine``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from evener.core.records import EvaluationRecord, RunStart, RunSummary, StepRecord
from evener.errors import EvenerError


class Observer:
    """Base class of observers: called at the start, after steps and evaluations, at other events, and at the end.

    Override the methods that you need. They are called on rank 0 only, or on every rank if ``everywhere`` is set. An
    observer is sent to the ranks by pickle, so open files in ``start``. An exception that an observer raises ends the
    run.
    """

    everywhere: bool = False
    ends_because: str = ""
    """Set this to a reason to end the run as if it were complete. All ranks stop after the same step: immediately if it
    is set in an evaluation at the end of an epoch, otherwise a few steps later."""

    def start(self, run: RunStart) -> None:
        """Called when everything is set up, before the first step."""

    def step(self, record: StepRecord) -> None:
        """Called after a step, when the results of all ranks are known."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Called after an evaluation."""

    def event(self, record: Any) -> None:
        """Called at any other event, such as a change of shares. The record has a text ``words``."""

    def end(self, summary: RunSummary | None) -> None:
        """Called at the end of the run; ``summary`` is None after an error. Close files here."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the observer's state, which must be serializable as JSON. Checkpoints store it. Empty by default."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that :meth:`state_dict` returned. Called after ``start`` when a run resumes."""


class Observers(Observer):
    """Calls several observers, in their order. Observers without ``everywhere`` are called on rank 0 only."""

    def __init__(self, observers: list[Observer], rank: int) -> None:
        self.ended = False
        """True if all ranks have agreed to take no further step."""
        self._rank = rank
        self._observers: list[Observer] = []
        self._started: list[Observer] = []
        self._loaded: dict[str, dict[str, Any]] = {}
        for each in observers:
            self.add(each)

    def add(self, observer: Observer) -> None:
        """Adds an observer, if it is to be called on this rank."""
        if self._rank == 0 or observer.everywhere:
            self._observers.append(observer)

    @property
    def are_some(self) -> bool:
        """True if this rank calls any observer."""
        return bool(self._observers)

    @property
    def ending(self) -> str:
        """The first observer of this rank that asks for the run to end, and its reason; empty if there is none."""
        return next(
            (f"{_name(each)}: {each.ends_because}" for each in self._observers if each.ends_because), ""
        )

    def start(self, run: RunStart) -> None:
        for each in self._observers:
            with _named(each, "at the start"):
                each.start(run)
            self._started.append(each)
        self.load_state_dict(self._loaded)  # again, since an observer's start() may reset its state
        self._loaded = {}

    def step(self, record: StepRecord) -> None:
        for each in self._observers:
            try:  # not _named, which would cost microseconds per step
                each.step(record)
            except Exception as error:
                _add_name(error, each, f"of step {record.step}")
                raise

    def evaluation(self, record: EvaluationRecord) -> None:
        for each in self._observers:
            with _named(each, f"of the evaluation after {record.step} steps"):
                each.evaluation(record)

    def event(self, record: Any) -> None:
        for each in self._observers:
            with _named(each, f"of an event at step {record.step}"):
                each.event(record)

    def end(self, summary: RunSummary | None) -> None:
        """Ends the observers that were started. If an observer's ``start`` failed, it and those after it were not.

        All of them are called even if one raises; the first exception is raised at the end.
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
        """Returns the state of each observer, by class and number."""
        own = [(label, each) for label, each in self._labelled() if _remembers(each)]
        return {label: each.state_dict() for label, each in own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state
        for label, each in self._labelled():
            if label in state:
                with _named(each, "of what it remembered"):
                    each.load_state_dict(state[label])

    def _labelled(self) -> Iterator[tuple[str, Observer]]:
        """Iterates over the observers with their labels: the class, and a number in the order of that class."""
        counts: Counter[str] = Counter()
        for each in self._observers:
            kind = f"{type(each).__module__}.{type(each).__qualname__}"
            yield f"{kind} {counts[kind]}", each
            counts[kind] += 1


def _remembers(observer: Observer) -> bool:
    return type(observer).state_dict is not Observer.state_dict


@contextmanager
def _named(observer: Observer, when: str) -> Iterator[None]:
    """Adds the observer's name to any exception that the block raises."""
    try:
        yield
    except Exception as error:
        _add_name(error, observer, when)
        raise


def _add_name(error: Exception, observer: Observer, when: str) -> None:
    """Adds a note to the traceback that names the observer. Evener's own errors are left unchanged."""
    if not isinstance(error, EvenerError):
        error.add_note(f"raised by the observer {_name(observer)}, told {when}")


def _name(observer: Observer) -> str:
    return type(observer).__name__
