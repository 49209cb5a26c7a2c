"""How much memory a pass over so many samples takes, learned from passes that had enough.

What a pass makes grows along a line with its samples: activations of each, and what does not depend on them. Two sizes
tell the line. Beyond what has been seen it is trusted for twice as many samples, no further::

    bytes │                ·  may be tried next: twice as many, if the line says that there is room
          │            ·
          │        ●
          │    ●
          └──────────────── samples

So the largest pass is found from below, and memory does not run out in finding it.
"""

from __future__ import annotations

import math

SPARE = 0.05
"""Part of the room that is left free: an allocator cannot use all of it."""


class Appetite:
    """What passes of one model take."""

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}

    @property
    def has_learned(self) -> bool:
        """Whether there was a pass."""
        return bool(self._taken)

    def learn(self, samples: int, nbytes: int, at_least: bool = False) -> None:
        """A pass over so many samples took so much; of several of one size the hungriest counts.

        Args:
            at_least: It took more, which was not to be told apart: this counts where it is beyond the line.
        """
        if at_least and not (self._taken and nbytes > self._expected(samples)):
            return
        self._taken[samples] = max(nbytes, self._taken.get(samples, 0))

    def capacity(self, room: float) -> float:
        """How many samples at once the line finds room for, at least one; infinite if nothing speaks against any."""
        if not self._taken or math.isinf(room):
            return math.inf
        fixed, slope = self._line()
        usable = room * (1 - SPARE)
        if slope == 0:
            return math.inf if fixed <= usable else 1
        return max(1, math.floor((usable - fixed) / slope))

    def most(self, room: float) -> int:
        """The most samples that may be passed at once, at least one: up to twice as many as ever were."""
        return int(min(self.capacity(room), 2 * max(self._taken, default=0.5)))

    def _expected(self, samples: int) -> float:
        fixed, slope = self._line()
        return fixed + slope * samples

    def _line(self) -> tuple[float, float]:
        """Bytes without samples, and for each, through the largest size and one of half of it or less."""
        more = max(self._taken)
        fewer = max((samples for samples in self._taken if 2 * samples <= more), default=0)
        slope = max(0.0, (self._taken[more] - self._taken.get(fewer, 0)) / (more - fewer))
        return self._taken[more] - slope * more, slope
