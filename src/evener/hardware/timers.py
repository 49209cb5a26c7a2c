"""How long a rank works, without its waiting for others.

A balancer that took waiting for work would find all ranks equal, since in a synchronous step all end together. So
whatever waits inside forward and backward (exact BatchNorm, the number of terms, the exchange of a bucket) does so in a
block ``with waiting():``, and the stopwatch that runs in this process stands still meanwhile::

    with stopwatch:       started ─ forward ─ [waiting] ─ forward ─ backward ─ mark ─ backward ─ mark ─ ...
    stopwatch.seconds()            ├─────────┤         ├──────────────────────────────────────────┤

On a GPU the host runs ahead of the work that it queues, and only events between that work tell its time. What counts is
elapsed time and not the processor's: on cores that others use too a rank is slower, and its user waits for that.

The running stopwatch is a plain global of the process, not a ``ContextVar`` and not thread-local: autograd runs
backward on threads of its own, which inherit neither. Stopwatches may end in another order than they began: that of a
loop that an error ended lives on as long as the error is kept.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Self

import torch

from evener.hardware.accelerators import WITH_STREAMS
from evener.hardware.async_read import DeferredValue, Readout, ReadyValue

_open: list[Stopwatch] = []
_running: Stopwatch | None = None
"""The last of those that are open."""


def running() -> Stopwatch | None:
    """The stopwatch that runs in this process."""
    return _running


class Stopwatch(ABC):
    """Entered where work begins, marked where it may have ended; of nested ones the inner runs.

    To end one that has ended changes nothing.
    """

    _waits = 0
    """Blocks of ``waiting()`` that are open, each within the one before."""

    @abstractmethod
    def start(self) -> None:
        """Work begins; what was measured before is forgotten."""

    @abstractmethod
    def mark(self) -> None:
        """Work has come this far: ``seconds`` ends at the last mark."""

    @abstractmethod
    def pause(self) -> None:
        """Waiting begins."""

    @abstractmethod
    def resume(self) -> None:
        """Waiting has ended."""

    @abstractmethod
    def taken(self) -> Readout:
        """Time from start to the last mark without the pauses between, in seconds; 0 before the first mark.

        It stays what it is when the stopwatch starts anew, and can be read then without waiting for a device.
        """

    @abstractmethod
    def whole(self) -> Readout:
        """Time from start to now, pauses included, in seconds; to be read as ``taken``."""

    def seconds(self) -> float:
        """``taken()``, read at once."""
        return self.taken().value()

    def __enter__(self) -> Self:
        global _running
        _open.append(self)
        _running = self
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        global _running
        if self in _open:
            _open.remove(self)
        _running = _open[-1] if _open else None


class HostStopwatch(Stopwatch):
    """For devices that have done their work when a call returns, as CPUs have.

    Args:
        clock: Seconds that only go forward.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = self._began = self._paused = self._seconds = 0.0

    def start(self) -> None:
        self._started = self._began = self._clock()
        self._seconds = 0.0

    def mark(self) -> None:
        self._seconds = self._clock() - self._began

    def pause(self) -> None:
        self._paused = self._clock()

    def resume(self) -> None:
        self._began += self._clock() - self._paused

    def taken(self) -> Readout:
        return ReadyValue(self._seconds)

    def whole(self) -> Readout:
        return ReadyValue(self._clock() - self._started)


class EventStopwatch(Stopwatch):
    """Events in the device's current stream, read when the device has passed them."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._began = _event()
        self._marked: torch.Event | None = None
        self._pauses: list[Pause] = []
        self._counted = 0

    def mark(self) -> None:
        self._marked, self._counted = _event(), len(self._pauses)

    def pause(self) -> None:
        self._paused = _event()

    def resume(self) -> None:
        self._pauses.append((self._paused, _event()))

    def taken(self) -> Readout:
        """As above; reading it waits until the device has passed the last mark."""
        if self._marked is None:
            return ReadyValue(0.0)
        return DeferredValue(
            partial(_elapsed_seconds, self._began, self._marked, self._pauses[: self._counted])
        )

    def whole(self) -> Readout:
        """As above; the device comes to the end of it after it has waited for what other ranks send."""
        return DeferredValue(partial(_elapsed_seconds, self._began, _event(), []))


Pause = tuple[torch.Event, torch.Event]


def _elapsed_seconds(began: torch.Event, marked: torch.Event, pauses: list[Pause]) -> float:
    marked.synchronize()
    paused = sum(begin.elapsed_time(end) for begin, end in pauses)
    return float(began.elapsed_time(marked) - paused) / 1e3


def _event() -> torch.Event:
    event = torch.Event(enable_timing=True)
    event.record()
    return event


STOPWATCHES: dict[str, Callable[[], Stopwatch]] = dict.fromkeys(WITH_STREAMS, EventStopwatch)
"""By type of device; for any other the host measures."""


def stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch for a kind of device."""
    return STOPWATCHES.get(device.type, HostStopwatch)()


class waiting:  # noqa: N801 # a block of every step, for which a generator's would be dear
    """The stopwatch that runs in this process, if any, stands still while the block waits for other ranks.

    A block inside of another changes nothing: the wait is that of the outer one.
    """

    __slots__ = ("_watch",)

    def __enter__(self) -> None:
        self._watch = watch = _running
        if watch is not None:
            if not watch._waits:
                watch.pause()
            watch._waits += 1

    def __exit__(self, *_: object) -> None:
        watch = self._watch
        if watch is not None:
            watch._waits -= 1
            if not watch._waits:
                watch.resume()
