"""Reads ``records.jsonl`` in bounded memory, whatever its length, and parses no more than the report needs.

The first numbers of a step (step, epoch, loss, samples, seconds) are in the index of the records. Without an index,
they have a fixed place at the begin of its line, where a regular expression finds them in a microsecond. Numbers by
rank are parsed for the steps that `KeptRows` wants, and for the slowest step of each column. So in a long run most
lines are not parsed as a whole, nor checked. A report is the same with an index and without.

A directory may come from a stranger: nothing in it is executed, and a number that is no measurement counts as unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from evener.core.os_errors import storage_errors
from evener.core.record_index import BY_RANK, INDEX, NUMBERS, ranks_of
from evener.errors import DataError
from evener.files import LONGEST_LINE, open_regular, parsed
from evener.tools.report.columns import Bins, KeptRows, Numbers, known_numbers
from evener.tools.report.index_reader import CHUNK, MOST_READ_RANKS, ROW_PLACE, ROW_RANKS, rows_of_index

_NUMBER = rb"(-?\d{1,20}(?:\.\d{1,20})?(?:[eE][-+]?\d{1,3})?)"
_STEP = re.compile(
    rb'\{"kind": "step", "step": (\d{1,15}), "epoch": (\d{1,15}), "loss": %b, "samples": (\d{1,15}), "seconds": %b, "'
    % (_NUMBER, _NUMBER)
)
_MOST_NUMBERS = 7680
"""Columns times ranks. With up to 16 ranks there are 480 columns."""
_LEAST_COLUMNS, _MOST_COLUMNS = 60, 480

STEP, EPOCH, LOSS, SAMPLES, SECONDS, POSITION, PLACE = range(7)
"""Fields of `Steps.bins`. The position is that among the steps of the file, the place that of the line in bytes."""
FIELDS = ("shares", *BY_RANK)
"""Fields of `Steps.kept`, by their names in a record; shares are fractions, and costs if there are any."""
SHARES, COMPUTE, WAIT, INPUT, FORWARD, PEAK, HELD = range(7)


@dataclass
class Steps:
    """The steps of a run, as far as the report needs them."""

    bins: Bins
    kept: KeptRows = field(default_factory=KeptRows)
    extremes: KeptRows = field(default_factory=KeptRows)
    """The rows of the slowest step of each column that are not in ``kept``."""
    last: dict[str, Any] = field(default_factory=dict)
    """The record of the last step that was kept."""
    rates: list[tuple[int, float]] = field(default_factory=list)
    """Learning rates of the steps that were kept, each with its position among the steps."""
    repeated: int = 0
    """Steps with a number that an earlier one has had."""
    repeated_seconds: float = 0.0


def number(value: Any) -> float:
    """Returns a number of a record; NaN for one that is not known, or too large to be a measurement.

    Raises:
        TypeError: If it is no number.
    """
    if value is None:
        return math.nan
    if type(value) not in (int, float):
        raise TypeError(f"a {type(value).__name__} stands for a number")
    return float(known_numbers([value])[0])


def numbers(value: Any) -> Numbers:
    """Returns the numbers of a list.

    Raises:
        TypeError, ValueError: If it is no list of numbers, or too long.
    """
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__} stands for the numbers of the ranks")
    if len(value) > MOST_READ_RANKS:
        raise ValueError(f"it has the numbers of {len(value):,} ranks")
    found = known_numbers(value)
    if found.ndim != 1:
        raise TypeError("lists stand for the numbers of the ranks")
    return found


def columns_for(ranks: int) -> int:
    """Returns the greatest number of columns for so many ranks, an even number: fewer for many ranks."""
    return min(_MOST_COLUMNS, max(_LEAST_COLUMNS, _MOST_NUMBERS // max(1, ranks))) // 2 * 2


class StepReader:
    """Reads the records of one run.

    Args:
        path: The file. Its index is used if it is there and fits.
        other: Called with each record that is not of a step.
        parts: For each rank, the part of the batch that it computes; if empty, each rank has its own.
        looks: Called with each step that is kept.
    """

    def __init__(
        self,
        path: Path,
        other: Callable[[dict[str, Any]], None],
        parts: tuple[int, ...] = (),
        looks: Callable[[dict[str, Any]], None] = lambda record: None,
    ) -> None:
        self._path, self._other, self._parts, self._looks = path, other, parts, looks
        self._steps = Steps(Bins(PLACE + 1, _MOST_COLUMNS, SECONDS))
        self._greatest, self._position = -1.0, 0
        self._pending: list[Sequence[float]] = []

    def read(self) -> Steps:
        """Reads the file.

        Raises:
            DataError: If a line that was parsed is no record. The message names it.
            StorageError: If the file cannot be read.
        """
        with storage_errors(f"the records in {self._path} cannot be read"), open_regular(self._path) as file:
            place, line_number = 0, 0
            for rows in rows_of_index(self._path.with_name(INDEX), file):
                place, line_number = int(rows[-1, ROW_PLACE]), line_number + len(rows)
                self._add_indexed(rows, file)
            file.seek(place)
            if line_number:  # the last one of the index
                place += len(file.readline(LONGEST_LINE))
            while line := file.readline(LONGEST_LINE):
                line_number += 1
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:  # still being written
                    break
                with self._naming(f"line {line_number}"):
                    self._add(line, place)
                place += len(line)
            self._count_pending()
            self._steps.bins.close()
            self._read_kept(file)
            self._read_extremes(file)
        return self._steps

    @contextmanager
    def _naming(self, line: str) -> Iterator[None]:
        """Names the line in errors about what it holds."""
        try:
            yield
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise DataError(f"{self._path}, {line} is no record: {_reason(error)}") from error

    def _record_at(self, file: BinaryIO, place: int) -> dict[str, Any]:
        file.seek(place)
        return _record(file.readline(LONGEST_LINE))

    def _add_indexed(self, rows: Numbers, file: BinaryIO) -> None:
        """Adds rows of the index."""
        is_step = rows[:, ROW_RANKS] >= 0
        for place in rows[~is_step, ROW_PLACE].astype(np.int64).tolist():
            with self._naming(f"the line at byte {place}"):
                self._other(self._record_at(file, place))
        steps, kept, first = rows[is_step], self._steps.kept, self._position
        at = -(-first // kept.every) * kept.every
        while at < first + len(steps):
            self._keep(at, int(steps[at - first, ROW_PLACE]), int(steps[at - first, ROW_RANKS]))
            at = (at // kept.every + 1) * kept.every
        self._position += len(steps)
        self._count(steps[:, : len(NUMBERS)], np.arange(first, self._position), steps[:, ROW_PLACE])

    def _add(self, line: bytes, place: int) -> None:
        found, position = _STEP.match(line), self._position
        if found is not None and position % self._steps.kept.every:
            scalars = [*map(float, found.groups())]
        else:
            record = _record(line)
            if record.get("kind") != "step":
                self._other(record)
                return
            scalars = [number(record[name]) for name in NUMBERS]
            if not scalars[STEP] >= 0 or not scalars[SAMPLES] >= 0:
                raise ValueError("its step or its number of samples is no number")
            if position % self._steps.kept.every == 0:
                self._row(record)  # which must have numbers
                self._keep(position, place, ranks_of(record))
        self._position += 1
        self._pending.append((*scalars, position, place))
        if len(self._pending) == CHUNK:
            self._count_pending()

    def _keep(self, position: int, place: int, ranks: int) -> None:
        if position == 0:
            self._steps.bins.limit(columns_for(ranks))
        self._steps.kept.plan(position, place, len(FIELDS) * ranks)

    def _count_pending(self) -> None:
        if self._pending:
            rows = known_numbers(self._pending)
            self._pending = []
            self._count(rows[:, : len(NUMBERS)], rows[:, POSITION], rows[:, PLACE])

    def _count(self, scalars: Numbers, positions: NDArray[Any], places: NDArray[Any]) -> None:
        """Counts steps of [steps, numbers] in the bins, and those of them that were repeated."""
        steps, seconds = self._steps, scalars[:, SECONDS]
        scalars[:, SECONDS] = seconds = np.where(seconds >= 0, seconds, np.nan)
        greatest = np.maximum.accumulate(np.concatenate([[self._greatest], scalars[:, STEP]]))
        again = scalars[:, STEP] <= greatest[:-1]
        self._greatest = float(greatest[-1])
        steps.repeated += int(again.sum())
        steps.repeated_seconds += float(np.nansum(seconds[again]))
        steps.bins.add(np.column_stack([scalars, positions, places]))

    def _row(self, record: dict[str, Any]) -> Numbers:
        """Returns the numbers by rank of a record as [fields, ranks]."""
        columns = [numbers(record.get(name) or []) for name in FIELDS]
        costs = record.get("costs")
        shares = numbers(costs) if costs else columns[SHARES]
        whole = float(shares.sum())
        shares = shares / whole if whole > 0 else np.full(len(shares), np.nan)
        if self._parts and max(self._parts) < len(shares):
            shares = shares[list(self._parts)]
        columns[SHARES] = shares
        ranks = max(map(len, columns[COMPUTE:])) or len(shares)
        row = np.full((len(FIELDS), ranks), np.nan)
        for place, column in enumerate(columns):
            row[place, : len(column)] = column[:ranks]
        return row

    def _read_kept(self, file: BinaryIO) -> None:
        """Reads the rows that are kept, with what else their records tell."""
        steps = self._steps
        for position, place in zip(steps.kept.steps, steps.kept.places, strict=True):
            with self._naming(f"the line at byte {place}"):
                record = self._record_at(file, place)
                steps.kept.rows.append(self._row(record))
                steps.rates.append((position, number(record.get("lr"))))
                steps.last = record
                self._looks(record)

    def _read_extremes(self, file: BinaryIO) -> None:
        """Reads the slowest step of each column, unless it was kept."""
        known = set(self._steps.kept.steps)
        for slowest in self._steps.bins.slow:
            position, place = int(slowest[POSITION]), int(slowest[PLACE])
            if position not in known:
                with self._naming(f"the line at byte {place}"):
                    self._steps.extremes.steps.append(position)
                    self._steps.extremes.rows.append(self._row(self._record_at(file, place)))


def _record(line: bytes) -> dict[str, Any]:
    record = parsed(line.decode())
    if not isinstance(record, dict):
        raise TypeError(f"it is a {type(record).__name__}")
    return record


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)
