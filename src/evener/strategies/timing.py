"""Measures the time of a rank's own work in a step, and prolongs it to emulate a slower device.

A rank's work ends with its last gradient bucket: afterwards it only waits for others and updates, which takes equally
long on all ranks. An emulated slower device sleeps just before it sends that bucket, in proportion to its work so far,
and likewise before each wait for other ranks within the passes, such as that of an exact BatchNorm. To all other ranks
it looks like a device that is really that slow::

    with work_timer.step(41):     forward ─ [sleep] waiting ─ backward ─ work_done: [sleep] ─ last bucket ─ ...
    work_timer.taken()           ├────────────────┤         ├──────────────────────────────┤
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from evener.balance.throttle import Throttle
from evener.hardware.async_read import Readout, ReadyValue
from evener.hardware.timers import Stopwatch


class WorkTimer:
    """Measures the work of rank ``rank`` with ``stopwatch``, and prolongs it if ``throttle`` is given.

    Emulation must know the duration of the work before it sleeps. So with a throttle, the host waits for the GPU in
    each step.

    Args:
        sleep: Sleeps for a number of seconds.
        in_passes: Sleeps before each wait until the end of the work, too. False for a timer around another one.
    """

    def __init__(
        self,
        stopwatch: Stopwatch,
        throttle: Throttle | None,
        rank: int,
        sleep: Callable[[float], None] = time.sleep,
        in_passes: bool = True,
    ) -> None:
        self._stopwatch, self._throttle, self._rank, self._sleep = stopwatch, throttle, rank, sleep
        self._step, self._is_done = 0, False
        if throttle is not None and in_passes:
            stopwatch.before_wait = lambda: self._is_done or self._catch_up(stopwatch.so_far())
        self._slept = 0.0
        self._elapsed: Readout = ReadyValue(0.0)
        self.begin_forward = stopwatch.begin_forward
        """Marks the begin of a forward pass."""
        self.end_forward = stopwatch.end_forward
        """Marks the end of a forward pass."""
        self.taken = stopwatch.taken
        """Returns the seconds of work in the last step, with emulated delay and without waiting."""
        self.forward = stopwatch.forward
        """Returns the seconds of the forward passes of the last step, a part of `taken`."""

    def step(self, number: int) -> Self:
        """Returns a context for the rank's part of step ``number``."""
        self._step = number
        return self

    def __enter__(self) -> None:
        self._slept, self._is_done = 0.0, False
        self._stopwatch.__enter__()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._elapsed = self._stopwatch.whole()
        self._stopwatch.__exit__()

    def work_done(self) -> None:
        """Marks the end of the rank's work so far. Sleeps if a slower device is emulated."""
        self._stopwatch.mark()
        self._is_done = True
        if self._throttle is not None and self._catch_up(self._stopwatch.seconds()):
            self._stopwatch.mark()

    def _catch_up(self, seconds: float) -> bool:
        """Sleeps until the step has taken as long as on the emulated device. Returns True if it had to.

        Args:
            seconds: The time of the step so far, without waits.
        """
        assert self._throttle is not None
        own = seconds - self._slept
        more = self._throttle.sleep_seconds(self._step, self._rank, own) - self._slept
        if more <= 0:
            return False
        self._sleep(more)
        self._slept += more
        return True

    def elapsed(self) -> Readout:
        """Returns the seconds of the rank's whole part of the last step, waiting included."""
        return self._elapsed
