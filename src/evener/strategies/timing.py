"""A rank's own work in a step: how long it takes, and how it is made longer where unequal devices are emulated.

The last bucket of gradients ends the work of a rank: what follows is waiting for others and the update, which is alike
on all. An emulated slower device sleeps just before it hands that bucket over, in proportion to its work so far, so
that to all others it looks exactly like a device that needs so long::

    with pace.step(41):     forward ─ backward ─ work_done: [sleep] ─ last bucket ─ ...
    pace.seconds()         ├──────────────────────────────────────┤
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from evener.balance.throttle import Throttle
from evener.hardware.async_read import Here, Readout
from evener.hardware.timers import Stopwatch


class Pace:
    """The work of rank ``rank`` on ``stopwatch``; of a real device, unless there is a ``throttle``.

    An emulated device has to know how long its work took before it sleeps: the host waits for a GPU then, in each step.

    Args:
        sleep: Lets seconds pass.
    """

    def __init__(
        self,
        stopwatch: Stopwatch,
        throttle: Throttle | None,
        rank: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._stopwatch, self._throttle, self._rank, self._sleep = stopwatch, throttle, rank, sleep
        self._step = 0
        self._slept = 0.0
        self._elapsed: Readout = Here(0.0)

    def step(self, number: int) -> Self:
        """Around the rank's part of a step."""
        self._step = number
        return self

    def __enter__(self) -> None:
        self._slept = 0.0
        self._stopwatch.__enter__()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._elapsed = self._stopwatch.whole()
        self._stopwatch.__exit__()

    def work_done(self) -> None:
        """The rank has done its work so far, but for what the emulation adds to it."""
        self._stopwatch.mark()
        if self._throttle is None:
            return
        own = self._stopwatch.seconds() - self._slept
        more = self._throttle.sleep_seconds(self._step, self._rank, own) - self._slept
        if more > 0:
            self._sleep(more)
            self._slept += more
            self._stopwatch.mark()

    def taken(self) -> Readout:
        """Time of the work in the last step in seconds, emulation included and waiting left out."""
        return self._stopwatch.taken()

    def elapsed(self) -> Readout:
        """Time of the rank's whole part of the last step in seconds, waiting included."""
        return self._elapsed
