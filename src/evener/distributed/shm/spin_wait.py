"""How a rank waits for a number of another rank, and what that costs those who want its core.

::

    looks         20 us       what is nearly there costs no switch of threads
    gives way     up to 2 ms  only while nobody else wants the core; the look after costs less than being woken
    sleeps                    in the kernel, until the other rank, which sees that somebody sleeps, wakes it

Giving way to somebody who computes costs a turn of his, some milliseconds, and it comes back late, while the kernel
gives a thread that it wakes its turn at once. Whether somebody wants the core is seen from how long giving way took:
where it was long, it is not tried again for a while, the longer the oftener that happens. Where a host has more ranks
than cores they want each other's, and it is not tried at all.
"""

from __future__ import annotations

import os
import time

_TAKEN_SECONDS = 100e-6
"""Giving way takes less than a microsecond where nobody is there."""
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.1, 10.0
_QUIET_SECONDS = 1.0


class Crowd:
    """Whether others want the cores of this process; all that waits in it shares what was seen."""

    def __init__(self) -> None:
        self._quiet_from = 0.0
        self._pause = _FIRST_PAUSE_SECONDS

    def may_give_way(self, now: float) -> bool:
        """Whether nobody is known to want the core at the time ``now`` (``time.monotonic()``)."""
        return now >= self._quiet_from

    def gave_way(self, now: float, seconds: float) -> None:
        """Giving way took ``seconds``, until ``now``."""
        if seconds > _TAKEN_SECONDS:
            self._pause = min(2 * self._pause, _LAST_PAUSE_SECONDS)
            self._quiet_from = now + self._pause
        elif now > self._quiet_from + _QUIET_SECONDS:
            self._pause = _FIRST_PAUSE_SECONDS


CROWD = Crowd()


def give_way(crowd: Crowd = CROWD) -> None:
    """Lets somebody else have the core, if anybody wants it."""
    began = time.monotonic()
    os.sched_yield()
    now = time.monotonic()
    crowd.gave_way(now, now - began)
