"""Marks of where a rank is in its program: a phase of its own work, or a wait for other ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import NamedTuple, Protocol

from evener.distributed.failure import is_communication_error
from evener.distributed.signals import asked
from evener.hardware.profile_ranges import named_range


class PhaseMark(NamedTuple):
    """A mark: phase and step, since when, whether it waits for other ranks, and the joint operation around it."""

    phase: str | None
    step: int | None
    waits: bool
    since: float
    together: str = ""


class Marked(Protocol):
    """Interface of the watchdog that a phase marks."""

    place: PhaseMark

    def moved(self) -> None:
        """Records that the rank makes progress."""

    def explain(self, error: BaseException) -> BaseException:
        """Returns the error that names the missing ranks."""


class Phase:
    """Context manager that marks where the rank is, also in a profile. Created by `Watchdog.phase` and
    `Watchdog.wait`."""

    __slots__ = ("_before", "_explains", "_place", "_range", "_watchdog")

    def __init__(self, watchdog: Marked, place: PhaseMark, explains: bool = False) -> None:
        self._watchdog, self._place, self._explains = watchdog, place, explains

    def __enter__(self) -> None:
        self._before = self._watchdog.place
        self._watchdog.place = self._place
        self._watchdog.moved()
        phase = self._place.phase
        self._range = named_range(phase) if phase != self._before.phase else _NO_RANGE
        self._range.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and (self._place.waits or self._explains):
                self._explain(error)
        finally:
            self._watchdog.place = self._before
            self._watchdog.moved()
            self._range.__exit__(None, None, None)

    def _explain(self, error: BaseException) -> None:
        # A run that is to stop has no time for it.
        if asked() is not None or not is_communication_error(error):
            return
        self._watchdog.place = self._place._replace(waits=True)
        explained = self._watchdog.explain(error)
        if explained is not error:
            raise explained from error


_NO_RANGE: AbstractContextManager[object] = nullcontext()
