"""The lines of many ranks as arrays, and the shares computed from them, fast enough for thousands of ranks.

The shares are those of :func:`~evener.balance.shares.solve`, computed without loops over ranks. Every rank of a run
computes them from the same numbers, and must get the same shares on any processor. So this module uses only sums,
products, quotients, roots and comparisons, whose rounding IEEE 754 defines exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evener.balance.division import CERTAIN, LEAST_PART, Division, MaxShares
from evener.balance.shares import too_small
from evener.balance.time_model import Line

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Lines:
    """The :class:`~evener.balance.time_model.Line` of every rank, as arrays indexed by rank."""

    overhead_seconds: Array
    seconds_per_sample: Array
    cliffs: tuple[tuple[Array, Array], ...] = ()
    """Pairs of arrays with a size and seconds for each rank; the size is infinite for a rank without a cliff."""

    def __len__(self) -> int:
        return len(self.overhead_seconds)

    def __getitem__(self, rank: int) -> Line:
        cliffs = [(float(sizes[rank]), float(least[rank])) for sizes, least in self.cliffs]
        own = tuple((int(size), least) for size, least in cliffs if size < math.inf)
        return Line(float(self.overhead_seconds[rank]), float(self.seconds_per_sample[rank]), own)

    def __call__(self, n: Array) -> Array:
        """Returns each rank's seconds for ``n[rank]`` samples."""
        seconds = self.overhead_seconds + self.seconds_per_sample * n
        for sizes, least in self.cliffs:
            seconds = np.where((sizes <= n) & (least > seconds), least, seconds)
        return np.where(n <= 0, 0.0, seconds)

    def scaled(self, factors: Array) -> Lines:
        """Returns the lines of devices that are ``factors[rank]`` times as slow."""
        cliffs = tuple((sizes, least * factors) for sizes, least in self.cliffs)
        return Lines(self.overhead_seconds * factors, self.seconds_per_sample * factors, cliffs)

    def tilted(self, step: int, spread: float) -> Lines:
        """Returns the lines of :func:`~evener.balance.division.tilted`."""
        odd = (np.arange(len(self)) + step) % 2 == 1
        return self.scaled(np.where(odd, 1.0 / (1.0 + spread), 1.0 / (1.0 - spread)))

    @classmethod
    def even(cls, ranks: int) -> Lines:
        """Returns the lines of ranks of unknown speed, all equally fast."""
        return cls(np.zeros(ranks), np.ones(ranks))


@dataclass(frozen=True, eq=False)
class DivisionOfMany:
    """Divides batches by the lines of many ranks; implements :class:`~evener.balance.division.Divides`."""

    lines: Lines
    floors: Array | None = None
    """The least fraction of the batch for each rank; None: 0 for all."""

    def __call__(
        self, batch_size: int, max_shares: MaxShares, share_multiple_of: int, placeholder: int = 0
    ) -> list[int]:
        found: list[int] = (
            _Solver(self, batch_size, max_shares, share_multiple_of, placeholder).shares.astype(int).tolist()
        )
        return found

    def near(self, shares: Sequence[int]) -> DivisionOfMany:
        old = np.array(shares, dtype=np.float64)
        least = np.where(old > CERTAIN, LEAST_PART * old / max(1, sum(shares)), 0.0)
        return replace(self, floors=least if least.any() else None)

    def seconds(self, rank: int, n: int) -> float:
        return self.lines[rank](n)

    def slowest(self, shares: Sequence[int]) -> float:
        return float(self.lines(np.array(shares, dtype=np.float64)).max())

    def values(self) -> list[Any]:
        lines = tuple(self.lines[rank] for rank in range(len(self.lines)))
        return Division(lines, () if self.floors is None else tuple(self.floors.tolist())).values()


class _Solver:
    """Computes the shares of one batch."""

    def __init__(
        self,
        division: DivisionOfMany,
        batch_size: int,
        max_shares: MaxShares,
        share_multiple_of: int,
        placeholder: int,
    ) -> None:
        self._lines, self._share_multiple_of, ranks = division.lines, share_multiple_of, len(division.lines)
        capped = np.array(max_shares, dtype=np.float64)  # None becomes NaN
        self._limits = np.where(capped < batch_size, capped, batch_size).astype(int)
        self._room = self._limits // share_multiple_of
        floors = np.zeros(ranks) if division.floors is None else division.floors
        free = placeholder if batch_size >= placeholder * ranks else 0
        self._free = np.maximum(
            free, (floors * batch_size).astype(int) // share_multiple_of * share_multiple_of
        )
        steps, self._remainder = divmod(batch_size, share_multiple_of)
        if int(self._room.sum()) < steps:
            raise too_small(self._limits.tolist(), batch_size, share_multiple_of)
        self.shares = self._with_remainder(self._units(steps) * share_multiple_of)

    def _seconds(self, n: Array) -> Array:
        return np.where(n <= self._free, 0.0, self._lines(n.astype(np.float64)))

    def _units(self, steps: int) -> NDArray[Any]:
        """Returns the quanta of each rank as the greedy of `solve` hands them out: each to the rank that then ends
        soonest. These are all quanta that end before a certain time, found by bisection, and of those that end exactly
        at that time the ones of lower ranks."""
        working = self._room > 0
        low = float(
            self._seconds(np.full(len(self._room), self._share_multiple_of))[working].min(initial=0.0)
        )
        high = float(self._seconds(self._room * self._share_multiple_of).max())
        given = np.zeros_like(self._room)
        while low < (middle := (low + high) / 2) < high and int(given.sum()) < steps:
            found = self._within(middle)
            if int(found.sum()) <= steps:
                low, given = middle, found
            else:
                high = middle
        more = self._within(high) - given
        before = np.cumsum(more) - more
        units: NDArray[Any] = given + np.clip(steps - int(given.sum()) - before, 0, more)
        return units

    def _within(self, seconds: float) -> NDArray[Any]:
        """Returns how many quanta each rank finishes within ``seconds``."""
        share_multiple_of, room = self._share_multiple_of, self._room
        lines = self._lines
        within = (seconds - lines.overhead_seconds) / (lines.seconds_per_sample * share_multiple_of)
        units = np.clip(within, 0, room).astype(int)
        while (more := (units < room) & (self._on_line(units + 1) <= seconds)).any():
            units = units + more
        while (less := (units > 0) & (self._on_line(units) > seconds)).any():
            units = units - less
        for sizes, least in lines.cliffs:
            below = np.where(least > seconds, np.ceil(sizes / share_multiple_of) - 1, np.inf)
            units = np.minimum(units, below).astype(int)
        found: NDArray[Any] = np.maximum(units, np.minimum(self._free // share_multiple_of, room))
        return found

    def _on_line(self, units: NDArray[Any]) -> Array:
        lines = self._lines
        seconds: Array = lines.overhead_seconds + lines.seconds_per_sample * (units * self._share_multiple_of)
        return seconds

    def _with_remainder(self, shares: NDArray[Any]) -> NDArray[Any]:
        """Adds the remainder, which is less than a multiple, to the share of the rank that ends soonest with it."""
        remainder = self._remainder
        if not remainder:
            return shares
        fits = shares + remainder <= self._limits
        if not fits.any():
            raise too_small(self._limits.tolist(), int(shares.sum()) + remainder, self._share_multiple_of)
        ends = np.where(fits, self._seconds(shares + remainder), np.inf)
        shares[int(np.argmin(ends))] += remainder
        return shares
