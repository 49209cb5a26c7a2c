"""A memory gauge that can be read several times in a step and still reports the peak of the whole step."""

from __future__ import annotations

from evener.hardware.memory.step_usage import Lap
from evener.hardware.memory.usage import Gauge


class Laps:
    """Wraps a gauge, and keeps the peak over several readings.

    Args:
        inner: A gauge that resets its peak whenever it is read.
    """

    def __init__(self, inner: Gauge) -> None:
        self._inner, self._peak = inner, 0
        self.every_seconds = inner.every_seconds

    def part(self) -> Lap:
        """Reads the memory, with the peak since the last call of ``part`` or ``lap``."""
        found = self._inner.lap()
        self._peak = max(self._peak, found.peak)
        return found

    def lap(self) -> Lap:
        """Reads the memory, with the peak since the last call of ``lap``."""
        now = self.part()
        peak, self._peak = self._peak, 0
        return now._replace(peak=peak)

    def kept(self) -> int:
        """Returns the bytes that were freed but still count as held."""
        return self._inner.kept()

    def empty(self) -> None:
        """Releases the allocator's cache to the device."""
        self._inner.empty()
