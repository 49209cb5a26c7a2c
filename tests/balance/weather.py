"""Ranks as real machines have them: their times drift together and for long, and strangers take a core for seconds.

The defaults were read off 500 steps of 40 ms of two and of three ranks on two cores, beside other programs: what the
ranks have in common varies by 7 to 9 % with a correlation of 0.4 from step to step, what is a rank's own by 6 to 11 %,
with one of 0.3, and its mean over 40 steps still by 1 to 3 %.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from evener.balance.base import Balancer, Fixed
from evener.balance.shares import solve
from tests.balance.simulator import Rank

Factors = list[list[float]]
"""For each step, by how much each rank's time is longer than its curve says."""


def wandering(source: random.Random, sigma: float, memory: float) -> Iterator[float]:
    """AR(1) noise of standard deviation ``sigma`` whose correlation from step to step is ``memory``."""
    value = source.gauss(0, sigma)
    while True:
        yield value
        value = memory * value + source.gauss(0, sigma * math.sqrt(1 - memory * memory))


@dataclass(frozen=True)
class Weather:
    """Logarithmic noise of the times of ranks; each pair is (standard deviation, correlation from step to step)."""

    common: tuple[float, float] = (0.07, 0.45)
    """Of all ranks alike."""
    climate: tuple[float, float] = (0.1, 0.99)
    """Of all ranks alike, and slow."""
    own: tuple[float, float] = (0.06, 0.3)
    drift: tuple[float, float] = (0.015, 0.98)
    """A rank's own, and slow."""
    spikes: float = 0.01
    """Part of the steps that take a rank three times as long."""
    strangers: float = 0.0
    """Part of the steps in which somebody comes to a rank's core ..."""
    stay: tuple[int, int] = (20, 120)
    """... for so many steps, in which the rank is slower by ``burden``."""
    burden: float = 1.6

    def factors(self, world_size: int, steps: int, seed: int) -> Factors:
        """What befalls each rank in each step, whatever its share is."""
        source = random.Random(seed)
        alike = [self._sums(source, steps, self.common, self.climate)] * world_size
        apart = [self._sums(source, steps, self.own, self.drift) for _ in range(world_size)]
        extra = [list(islice(self._visits(source), steps)) for _ in range(world_size)]
        each = [
            [math.exp(a + b) * c for a, b, c in zip(*three, strict=True)]
            for three in zip(alike, apart, extra, strict=True)
        ]
        return [list(row) for row in zip(*each, strict=True)]

    def _sums(self, source: random.Random, steps: int, *parts: tuple[float, float]) -> list[float]:
        walks = [islice(wandering(source, *part), steps) for part in parts]
        return [sum(values) for values in zip(*walks, strict=True)]

    def _visits(self, source: random.Random) -> Iterator[float]:
        left = 0
        while True:
            if not left and source.random() < self.strangers:
                left = source.randint(*self.stay)
            yield (self.burden if left else 1.0) * (3.0 if source.random() < self.spikes else 1.0)
            left = max(0, left - 1)


CALM = Weather(common=(0.02, 0.3), climate=(0.02, 0.99), own=(0.015, 0.3), drift=(0.005, 0.98), spikes=0.0)
USUAL = Weather()
BUSY = Weather(own=(0.1, 0.35), drift=(0.03, 0.98), spikes=0.02, strangers=0.003)
STORM = Weather(
    common=(0.2, 0.5),
    climate=(0.3, 0.99),
    own=(0.25, 0.4),
    drift=(0.06, 0.95),
    spikes=0.05,
    strangers=0.01,
    stay=(5, 40),
)
WEATHERS = {"calm": CALM, "usual": USUAL, "busy": BUSY, "storm": STORM}


def lived(
    balancer: Balancer, ranks: Sequence[Rank], factors: Factors, batch_size: int, lookahead: int = 2
) -> list[float]:
    """What each step took, its slowest rank."""
    shares: dict[int, list[int]] = {}
    seconds = []
    for step, row in enumerate(factors):
        for ahead in range(step, step + lookahead + 1):
            shares.setdefault(ahead, balancer.shares(ahead, batch_size))
        now = shares.pop(step)
        times = [
            rank.seconds(step, n) * factor if n else math.nan
            for rank, n, factor in zip(ranks, now, row, strict=True)
        ]
        seconds.append(max(time for time in times if time == time))
        balancer.observe(step, now, times)
    return seconds


def best(ranks: Sequence[Rank], batch_size: int, step: int = 0) -> Fixed:
    """Fixed shares that are the optimum of the ranks' curves, as they are in ``step``."""
    return Fixed(solve([lambda n, rank=rank: rank.seconds(step, n) for rank in ranks], batch_size))
