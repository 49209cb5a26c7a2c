"""A gauge that forgets its peak whenever it is read, read several times in a step."""

from __future__ import annotations

from evener.hardware.memory.interval_peak import Laps
from evener.hardware.memory.step_usage import Lap


class Told:
    every_seconds = 0.0

    def __init__(self, *uses: Lap) -> None:
        self._uses = list(uses)

    def lap(self) -> Lap:
        return self._uses.pop(0)

    def kept(self) -> int:
        return 3

    def empty(self) -> None:
        self._uses.clear()


def test_the_peak_of_a_lap_is_that_of_its_parts() -> None:
    uses = [Lap(1, 5), Lap(2, 9), Lap(3, 4, 20), Lap(3, 3), Lap(3, 7)]
    laps = Laps(Told(*uses))
    assert [laps.part(), laps.part()] == uses[:2]
    assert laps.lap() == Lap(3, 9, 20)
    assert laps.part() == uses[3]
    assert laps.lap() == Lap(3, 7)
