"""Measures the compute time of a rank, without the time that it waits for others.

All ranks finish a synchronous step together, so a balancer that counted waiting as work would find them equally fast.
Code that waits within forward and backward (exact BatchNorm, the number of terms, the exchange of a bucket) does so in
a block ``with waiting():``, which pauses the running stopwatch of the process::

    with stopwatch:       started ─ forward ─ [waiting] ─ forward ─ backward ─ mark ─ backward ─ mark ─ ...
    stopwatch.seconds()            ├─────────┤         ├──────────────────────────────────────────┤

On a GPU the host runs ahead of the work that it queues, so that only events between that work can time it. The time is
elapsed time, not CPU time: a rank on cores that others also use is slower, and the balancer must take account of that.

The running stopwatch is a global variable, not a ``ContextVar`` and not thread-local: autograd runs backward in threads
of its own, which inherit neither. Stopwatches may end in a different order than they started: if an error ended a loop,
its stopwatch may remain open as long as the exception is referenced.
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
from evener.hardware.profile_ranges import named_range

_open: list[Stopwatch] = []
_running: Stopwatch | None = None
"""The last of the open stopwatches."""


def running() -> Stopwatch | None:
    """Returns the stopwatch that runs in this process. Returns None if there is none."""
    return _running


class Stopwatch(ABC):
    """Measures compute time: a context manager that starts the clock; `mark` sets the end of the measured time.

    Of nested stopwatches only the innermost is running. Exiting one that has already ended has no effect.
    """

    _waits = 0
    """Number of open, nested ``waiting()`` blocks."""
    before_wait: Callable[[], object] | None = None
    """Called before the clock is stopped for a wait."""

    @abstractmethod
    def start(self) -> None:
        """Starts the clock, and discards earlier measurements."""

    @abstractmethod
    def mark(self) -> None:
        """Sets the end of the measured time to now. May be called repeatedly; the last call counts."""

    @abstractmethod
    def pause(self) -> None:
        """Stops the clock while the rank waits."""

    @abstractmethod
    def resume(self) -> None:
        """Resumes the clock after a wait."""

    @abstractmethod
    def taken(self) -> Readout:
        """Returns the time from start to the last mark without pauses, in seconds; 0 before the first mark.

        The readout does not change when the stopwatch is restarted. It can be read later, when the device has passed
        the mark, without waiting for it.
        """

    @abstractmethod
    def begin_forward(self) -> None:
        """Marks the begin of a forward pass."""

    @abstractmethod
    def end_forward(self) -> None:
        """Marks the end of a forward pass."""

    @abstractmethod
    def forward(self) -> Readout:
        """Returns the time of all forward passes since the start without pauses, in seconds; a readout like that of
        `taken`."""

    @abstractmethod
    def whole(self) -> Readout:
        """Returns the time from start to now, including pauses, in seconds, as a readout like that of `taken`."""

    @abstractmethod
    def so_far(self) -> float:
        """Returns the time from start to now without pauses, in seconds. May wait for the device."""

    def seconds(self) -> float:
        """Returns the value of `taken` at once, which may wait for the device."""
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
    """Measures with the host's clock, for devices that work synchronously, such as CPUs.

    Args:
        clock: A monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = self._began = self._paused = self._seconds = 0.0
        self._pass = self._forward = 0.0

    def start(self) -> None:
        self._started = self._began = self._clock()
        self._seconds = self._forward = 0.0

    def mark(self) -> None:
        self._seconds = self._clock() - self._began

    def pause(self) -> None:
        self._paused = self._clock()

    def resume(self) -> None:
        self._began += self._clock() - self._paused

    def begin_forward(self) -> None:
        self._pass = self._clock() - self._began

    def end_forward(self) -> None:
        self._forward += self._clock() - self._began - self._pass

    def forward(self) -> Readout:
        return ReadyValue(self._forward)

    def taken(self) -> Readout:
        return ReadyValue(self._seconds)

    def whole(self) -> Readout:
        return ReadyValue(self._clock() - self._started)

    def so_far(self) -> float:
        return self._clock() - self._began


class EventStopwatch(Stopwatch):
    """Measures with events in the device's current stream, for devices that work asynchronously."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._began = recorded_event()
        self._marked: torch.Event | None = None
        self._pauses: list[Pause] = []
        self._passes: list[tuple[torch.Event, torch.Event, list[Pause]]] = []
        self._counted = 0

    def mark(self) -> None:
        self._marked, self._counted = recorded_event(), len(self._pauses)

    def pause(self) -> None:
        self._paused = recorded_event()

    def resume(self) -> None:
        self._pauses.append((self._paused, recorded_event()))

    def begin_forward(self) -> None:
        self._pass = recorded_event(), len(self._pauses)

    def end_forward(self) -> None:
        begun, pauses = self._pass
        self._passes.append((begun, recorded_event(), self._pauses[pauses:]))

    def forward(self) -> Readout:
        """Returns the time of the forward passes. Reading the value waits until the device has passed the last one."""
        passes = self._passes
        return DeferredValue(lambda: sum(_elapsed_seconds(*each) for each in passes))

    def taken(self) -> Readout:
        """Returns the time without pauses. Reading the value waits until the device has passed the last mark."""
        if self._marked is None:
            return ReadyValue(0.0)
        return DeferredValue(
            partial(_elapsed_seconds, self._began, self._marked, self._pauses[: self._counted])
        )

    def whole(self) -> Readout:
        """Returns the time including pauses. Reading the value waits for the device, which may wait for other ranks."""
        return DeferredValue(partial(_elapsed_seconds, self._began, recorded_event(), []))

    def so_far(self) -> float:
        return _elapsed_seconds(self._began, recorded_event(), self._pauses)


Pause = tuple[torch.Event, torch.Event]


def _elapsed_seconds(began: torch.Event, marked: torch.Event, pauses: list[Pause]) -> float:
    marked.synchronize()
    paused = sum(begin.elapsed_time(end) for begin, end in pauses)
    return float(began.elapsed_time(marked) - paused) / 1e3


def recorded_event() -> torch.Event:
    """Returns an event with a time, recorded in the device's current stream."""
    event = torch.Event(enable_timing=True)
    event.record()
    return event


STOPWATCHES: dict[str, Callable[[], Stopwatch]] = dict.fromkeys(WITH_STREAMS, EventStopwatch)
"""Stopwatch class by device type. Other types use `HostStopwatch`."""


def stopwatch(device: torch.device) -> Stopwatch:
    """Creates the stopwatch for a device."""
    return STOPWATCHES.get(device.type, HostStopwatch)()


class waiting:  # noqa: N801 # used in every step, where a generator-based context manager is slow
    """Pauses the running stopwatch of this process, if any, while the block waits for other ranks.

    A nested block has no effect: the wait is counted by the outer one.
    """

    __slots__ = ("_range", "_watch")

    def __enter__(self) -> None:
        self._range = named_range("waiting")
        self._range.__enter__()
        self._watch = watch = _running
        if watch is not None:
            if not watch._waits:
                if watch.before_wait is not None:
                    watch.before_wait()
                watch.pause()
            watch._waits += 1

    def __exit__(self, *_: object) -> None:
        watch = self._watch
        if watch is not None:
            watch._waits -= 1
            if not watch._waits:
                watch.resume()
        self._range.__exit__(None, None, None)
