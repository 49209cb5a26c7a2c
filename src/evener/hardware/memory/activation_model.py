"""Predicts the peak memory of a pass over a number of samples, from passes that succeeded.

At every moment of a pass, memory has a constant part and a part proportional to the samples. The peak is the maximum
over all moments: a convex function of the number of samples, which never grows faster than in proportion::

    bytes │            ╱ ·        beyond the largest size: in proportion, an upper bound
          │        ●╱
          │     ─╱                between two sizes: their chord, an upper bound of a convex function
          │ ●─╱
          └──────────────── samples

Extrapolating a line through two sizes could predict too little memory: beyond them, another moment may have the peak.
With an upper bound, the largest possible pass is approached from below, without running out of memory.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

SPARE = 0.05
"""Fraction of the available memory that is left free: an allocator cannot use all of it."""


class ActivationModel:
    """Predicts the memory of passes of one model."""

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}

    @property
    def has_learned(self) -> bool:
        """True if at least one pass was measured."""
        return bool(self._taken)

    def learn(self, samples: int, nbytes: int, at_least: bool = False) -> None:
        """Adds a measurement: a pass over ``samples`` took ``nbytes``. For each size the maximum is kept.

        Args:
            at_least: ``nbytes`` is only a lower bound. The measurement is then used only if the model predicted that
                ``samples`` would fit into ``nbytes``.
        """
        expected = not self._taken or self.capacity(nbytes / (1 - SPARE)) < samples
        if at_least and expected:
            return
        self._taken[samples] = max(nbytes, self._taken.get(samples, 0))

    def capacity(self, room: float) -> float:
        """Returns the number of samples of a pass that surely fits into ``room`` bytes, at least 1.

        Infinite if there is no measurement, or no limit.
        """
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
        """Returns the largest allowed pass in samples, at least 1: `capacity`, but at most twice the largest pass so
        far.
        """
        return int(min(self.capacity(room), 2 * max(self._taken, default=0.5)))

    def _known(self) -> list[tuple[int, int]]:
        """Returns the measured sizes with their bytes, made monotonic: a larger size takes at least as many bytes."""
        sizes = sorted(self._taken)
        return list(zip(sizes, accumulate((self._taken[size] for size in sizes), max), strict=True))
