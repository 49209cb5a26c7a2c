"""How much memory a pass over so many samples takes at most, known from passes that had enough.

At every moment of a pass there is something that does not depend on its samples, and something for each of them; the
peak is that of the hungriest moment. It grows with the samples, ever faster, but never faster than they do::

    bytes │            ╱ ·        beyond what has been passed: in proportion, for all moments grow less
          │        ●╱
          │     ─╱                between two sizes: their chord, for the peak bends upwards
          │ ●─╱
          └──────────────── samples

A line through two sizes would promise too much: another moment may be the hungriest beyond them. So the largest pass is
found from below, and memory does not run out in finding it.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

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
            at_least: It took more, which was not to be told apart: this counts where so much was not thought possible.
        """
        expected = not self._taken or self.capacity(nbytes / (1 - SPARE)) < samples
        if at_least and expected:
            return
        self._taken[samples] = max(nbytes, self._taken.get(samples, 0))

    def capacity(self, room: float) -> float:
        """How many samples at once are sure to have room, at least one; infinite if nothing speaks against any."""
        if not self._taken or math.isinf(room):
            return math.inf
        usable, known = room * (1 - SPARE), self._known()
        most, hungriest = known[-1]
        if hungriest <= usable:
            return most * usable // hungriest if hungriest else math.inf
        for (fewer, less), (more, much) in pairwise(known):
            if less <= usable < much:
                return fewer + (usable - less) * (more - fewer) // (much - less)
        return 1

    def most(self, room: float) -> int:
        """The most samples that may be passed at once, at least one: up to twice as many as ever were."""
        return int(min(self.capacity(room), 2 * max(self._taken, default=0.5)))

    def _known(self) -> list[tuple[int, int]]:
        """Sizes and their bytes, of which no smaller one takes more."""
        sizes = sorted(self._taken)
        return list(zip(sizes, accumulate((self._taken[size] for size in sizes), max), strict=True))
