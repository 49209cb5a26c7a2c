"""Where a rank is in its program, as its code marks it: a phase of its own work, or a wait for other ranks."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple, Protocol

from evener.distributed.failure import is_communication_error
from evener.distributed.signals import asked


class Place(NamedTuple):
    """A mark: a phase, since when, and whether other ranks are waited for there."""

    phase: str | None
    step: int | None
    waits: bool
    since: float
    together: str = ""


class Marked(Protocol):
    """What a phase marks: the watchdog of the rank."""

    place: Place

    def moved(self) -> None:
        """The rank makes progress."""

    def explain(self, error: BaseException) -> BaseException:
        """The error that says who is missing."""


class Phase:
    """Marks where the rank is while the block runs; made by `Watchdog.phase` and `Watchdog.wait`."""

    __slots__ = ("_before", "_place", "_watchdog")

    def __init__(self, watchdog: Marked, place: Place) -> None:
        self._watchdog, self._place = watchdog, place

    def __enter__(self) -> None:
        self._before = self._watchdog.place
        self._watchdog.place = self._place
        self._watchdog.moved()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            explains = self._place.waits and asked() is None  # a run that was asked to stop has no time to
            if error is not None and explains and is_communication_error(error):
                explained = self._watchdog.explain(error)
                if explained is not error:
                    raise explained from error
        finally:
            self._watchdog.place = self._before
            self._watchdog.moved()
