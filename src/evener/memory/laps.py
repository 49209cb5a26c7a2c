"""A gauge that is read several times in a step, and still knows the peak of the whole."""

from __future__ import annotations

from evener.memory.gauge import NOTHING, Gauge, MemoryUse


class Laps:
    """A gauge around another one.

    Args:
        inner: Which forgets the peak whenever it is read.
    """

    def __init__(self, inner: Gauge) -> None:
        self._inner, self._highest = inner, NOTHING

    def part(self) -> MemoryUse:
        """Since the last part or lap."""
        found = self._inner.lap()
        self._highest = max(self._highest, found, key=lambda use: use.peak)
        return found

    def lap(self) -> MemoryUse:
        """Since the last lap."""
        now = self.part()
        highest, self._highest = self._highest, NOTHING
        return now._replace(peak=highest.peak)
