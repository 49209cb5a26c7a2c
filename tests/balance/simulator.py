"""Ranks of known speed, so that what a balancer reaches can be compared with the true optimum."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evener.balance.base import Balancer
from evener.balance.shares import solve


def steady(step: int) -> float:
    return 1.0


def slow_between(first: int, last: int, factor: float) -> Callable[[int], float]:
    return lambda step: factor if first <= step < last else 1.0


@dataclass(frozen=True)
class Rank:
    """``(overhead + price * n) * slowness(step)`` seconds for ``n`` samples, 0 for none."""

    overhead: float
    price: float
    slowness: Callable[[int], float] = steady

    def seconds(self, step: int, n: int) -> float:
        return (self.overhead + self.price * n) * self.slowness(step) if n else 0.0


@dataclass(frozen=True)
class Step:
    shares: list[int]
    seconds: float
    optimum: float

    @property
    def excess(self) -> float:
        """Relative time above the optimum."""
        return self.seconds / self.optimum - 1


def slowest(ranks: Sequence[Rank], step: int, shares: Sequence[int]) -> float:
    return max(rank.seconds(step, n) for rank, n in zip(ranks, shares, strict=True))


def simulate(
    balancer: Balancer,
    ranks: Sequence[Rank],
    batch_size: int | Callable[[int], int],
    steps: int,
    *,
    noise: float = 0.02,
    spikes: float = 0.0,
    seed: int = 0,
    lookahead: int = 2,
    first: int = 0,
) -> list[Step]:
    """What each step took, without its noise; asks for shares ``lookahead`` steps ahead, as a loader does."""
    source = random.Random(seed)
    size = batch_size if callable(batch_size) else lambda _: batch_size
    prefetched: dict[int, list[int]] = {}
    done = []
    for step in range(first, first + steps):
        for ahead in range(step, step + lookahead + 1):
            prefetched.setdefault(ahead, balancer.shares(ahead, size(ahead)))
        shares = prefetched.pop(step)
        assert shares == balancer.shares(step, size(step)), "the shares of a settled step have changed"
        assert sum(shares) == size(step)
        seen = [
            rank.seconds(step, n) * source.lognormvariate(0, noise) * (3 if source.random() < spikes else 1)
            for rank, n in zip(ranks, shares, strict=True)
        ]
        times = [lambda n, rank=rank, step=step: rank.seconds(step, n) for rank in ranks]
        best = slowest(ranks, step, solve(times, size(step)))
        done.append(Step(shares, slowest(ranks, step, shares), best))
        balancer.observe(step, shares, seen)
    return done
