"""Reduces the steps of a run to a bounded number of columns while they are read, whatever their number.

Every step counts in the numbers of the whole run, such as its loss: bins of equal width take them in, and whenever all
bins are full, two become one. Numbers by rank are many more, so only every ``n``-th step is kept, and ``n`` doubles
whenever these are too many::

    steps         0 1 2 3 4 5 6 7 8 9 ...
    bins          [0 1] [2 3] [4 5] [6 7]       minimum, mean and maximum of all steps in it, and its slowest step
    rows kept      0     2     4     6          every 2nd
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

_MOST_KEPT = 1 << 19
"""Numbers by rank that are kept."""
_LEAST_ROWS, _MOST_ROWS = 128, 4096
_GREATEST = 1e18
"""Numbers of this size or larger are no measurements, and not known."""


def known_numbers(values: Sequence[Any] | NDArray[Any]) -> Numbers:
    """Returns numbers as an array, with NaN for None and for what is too large to be a measurement.

    Raises:
        ValueError, TypeError, OverflowError: If they are no numbers.
    """
    found = np.array(values, dtype=np.float64)
    found[np.abs(found) >= _GREATEST] = np.nan
    return found


@dataclass
class Spread:
    """Minimum, mean and maximum of each column, in arrays of one shape. NaN stands for a column without a number."""

    minimum: Numbers
    mean: Numbers
    maximum: Numbers


class Bins:
    """Bins of equal width over rows of numbers, of which NaN stands for one that is not known.

    Args:
        fields: Numbers in a row.
        most: The largest number of bins, an even number.
        slowest: The field by which each bin keeps its slowest row, with the greatest value.
    """

    def __init__(self, fields: int, most: int, slowest: int) -> None:
        self._fields, self._most, self._slowest = fields, most, slowest
        self.width = 1
        """Rows in a bin."""
        self._rest = np.empty((0, fields))
        self._binned = 0
        self._minimum, self.total, self.known, self._maximum = (np.empty((0, fields)) for _ in range(4))
        """Of the rows of each bin, as [bins, fields]: ``known`` is how many of them have a number."""
        self.slow = np.empty((0, fields))
        """The slowest row of each bin."""

    def __len__(self) -> int:
        return len(self.slow)

    @property
    def rows(self) -> int:
        """Number of rows so far."""
        return self._binned + len(self._rest)

    def limit(self, most: int) -> None:
        """Sets the largest number of bins, an even number, before rows are added."""
        self._most = most

    def add(self, rows: Numbers) -> None:
        """Adds rows of [rows, fields]."""
        self._rest = np.concatenate([self._rest, rows])
        while len(self._rest) >= self.width:
            if len(self) == self._most:
                self._halve()
                continue
            number = min(len(self._rest) // self.width, self._most - len(self))
            block, self._rest = self._rest[: number * self.width], self._rest[number * self.width :]
            self._append(block.reshape(number, self.width, self._fields))

    def close(self) -> None:
        """Makes the last bin of the rows that are left, which may be fewer than in other bins."""
        if len(self._rest):
            if len(self) == self._most:
                self._halve()
            self._append(self._rest[None])
            self._rest = self._rest[:0]

    def spread(self, field: int) -> Spread:
        """Returns one field of all bins."""
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = self.total[:, field] / self.known[:, field]
        return Spread(self._minimum[:, field], mean, self._maximum[:, field])

    def _append(self, block: Numbers) -> None:
        """Adds a bin for each entry of ``block`` [bins, rows, fields]."""
        number, rows = block.shape[:2]
        known = ~np.isnan(block)
        slow = np.where(known[..., self._slowest], block[..., self._slowest], -np.inf).argmax(axis=1)
        self._binned += number * rows
        self._minimum = np.concatenate([self._minimum, np.fmin.reduce(block, axis=1)])
        self.total = np.concatenate([self.total, np.where(known, block, 0.0).sum(axis=1)])
        self.known = np.concatenate([self.known, known.sum(axis=1)])
        self._maximum = np.concatenate([self._maximum, np.fmax.reduce(block, axis=1)])
        self.slow = np.concatenate([self.slow, block[np.arange(number), slow]])

    def _halve(self) -> None:
        self.width *= 2
        later = np.nan_to_num(self.slow[:, self._slowest], nan=-np.inf).reshape(-1, 2).argmax(axis=1)
        self.slow = self.slow.reshape(-1, 2, self._fields)[np.arange(len(later)), later]
        self._minimum = np.fmin(self._minimum[::2], self._minimum[1::2])
        self.total = self.total[::2] + self.total[1::2]
        self.known = self.known[::2] + self.known[1::2]
        self._maximum = np.fmax(self._maximum[::2], self._maximum[1::2])


class KeptRows:
    """Rows of numbers by rank of every ``every``-th step: first their places, later their numbers."""

    def __init__(self) -> None:
        self.every = 1
        self.steps: list[int] = []
        """The position of each row among the steps that were read."""
        self.places: list[int] = []
        """The place of the line of each row in the file."""
        self.rows: list[Numbers] = []
        """Each of [fields, ranks]."""

    def plan(self, position: int, place: int, size: int) -> None:
        """Notes the place of a row of ``size`` numbers, of a step at a multiple of ``every``, and drops every second
        row if there are too many."""
        self.steps.append(position)
        self.places.append(place)
        if len(self.steps) > max(_LEAST_ROWS, min(_MOST_ROWS, _MOST_KEPT // max(1, size))):
            self.every *= 2
            kept = [at for at, step in enumerate(self.steps) if step % self.every == 0]
            self.steps, self.places = [self.steps[at] for at in kept], [self.places[at] for at in kept]

    def table(self) -> Numbers:
        """Returns all rows as [rows, fields, ranks]. The number of ranks is the greatest of any row."""
        ranks = max((row.shape[1] for row in self.rows), default=0)
        padded = [
            np.pad(row, ((0, 0), (0, ranks - row.shape[1])), constant_values=np.nan) for row in self.rows
        ]
        return np.array(padded) if padded else np.empty((0, 0, 0))


def spread_over(columns: NDArray[np.int64], values: Numbers, number: int) -> Spread:
    """Returns the spread of rows over columns.

    Args:
        columns: The column of each row, in ascending order.
        values: Numbers of [rows, ranks].
        number: How many columns there are. The result is of [columns, ranks].
    """
    present, starts = np.unique(columns, return_index=True)
    known = ~np.isnan(values)
    minimum, mean, maximum = (np.full((number, values.shape[1]), np.nan) for _ in range(3))
    if len(present):
        minimum[present] = np.fmin.reduceat(values, starts, axis=0)
        maximum[present] = np.fmax.reduceat(values, starts, axis=0)
        total = np.add.reduceat(np.where(known, values, 0.0), starts, axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean[present] = total / np.add.reduceat(known.astype(np.float64), starts, axis=0)
    return Spread(minimum, mean, maximum)


def widened(spread: Spread, columns: NDArray[np.int64], rows: Numbers) -> Spread:
    """Returns the spread with the extremes of further rows, at most one a column, which do not count in the mean."""
    minimum, maximum = spread.minimum.copy(), spread.maximum.copy()
    minimum[columns] = np.fmin(minimum[columns], rows)
    maximum[columns] = np.fmax(maximum[columns], rows)
    return Spread(minimum, spread.mean, maximum)
