"""Decides when a rank that waits for another rank may yield its core, and when it must sleep.

::

    spins         20 us       a short wait costs no switch of threads
    yields        up to 2 ms  only while no other thread wants the core; cheaper than being woken
    sleeps                    in the kernel, until the other rank, which sees that this one sleeps, wakes it

After a yield to a thread that computes, a rank gets the core back only after that thread's time slice, some
milliseconds later. A sleeping thread gets a core as soon as the kernel wakes it. So a yield that took long shows that
another thread wants the core, and yielding is not tried again for a while; the pause doubles each time. If a host has
more ranks than cores, the caller does not yield at all.
"""

from __future__ import annotations

import os
import time

_TAKEN_SECONDS = 100e-6
"""A yield that takes longer shows that another thread wants the core. Otherwise it takes less than a microsecond."""
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.1, 10.0
_QUIET_SECONDS = 1.0


class SpinWait:
    """Tracks whether other threads want the cores of this process. All waits of the process share it."""

    def __init__(self) -> None:
        self._quiet_from = 0.0
        self._pause = _FIRST_PAUSE_SECONDS

    def may_give_way(self, now: float) -> bool:
        """Returns True if no other thread is known to want the core at the time ``now`` (``time.monotonic()``)."""
        return now >= self._quiet_from

    def gave_way(self, now: float, seconds: float) -> None:
        """Records a yield that took ``seconds`` and ended at ``now``."""
        if seconds > _TAKEN_SECONDS:
            self._pause = min(2 * self._pause, _LAST_PAUSE_SECONDS)
            self._quiet_from = now + self._pause
        elif now > self._quiet_from + _QUIET_SECONDS:
            self._pause = _FIRST_PAUSE_SECONDS


CROWD = SpinWait()


def give_way(crowd: SpinWait = CROWD) -> None:
    """Yields the core to another thread, if one wants it."""
    began = time.monotonic()
    os.sched_yield()
    now = time.monotonic()
    crowd.gave_way(now, now - began)
