"""A gauge that forgets its peak whenever it is read, read several times in a step."""

from __future__ import annotations

from evener.memory.gauge import MemoryUse
from evener.memory.laps import Laps


class Told:
    def __init__(self, *uses: MemoryUse) -> None:
        self._uses = list(uses)

    def lap(self) -> MemoryUse:
        return self._uses.pop(0)


def test_the_peak_of_a_lap_is_that_of_its_parts() -> None:
    uses = [MemoryUse(1, 5), MemoryUse(2, 9), MemoryUse(3, 4, 20), MemoryUse(3, 3), MemoryUse(3, 7)]
    laps = Laps(Told(*uses))
    assert [laps.part(), laps.part()] == uses[:2]
    assert laps.lap() == MemoryUse(3, 9, 20)
    assert laps.part() == uses[3]
    assert laps.lap() == MemoryUse(3, 7)
