"""Reads ``records.jsonl`` once, in bounded memory, whatever its length, and parses no more than the report needs.

The first numbers of a step (step, epoch, loss, samples, seconds) have a fixed place at the begin of its line, where a
regular expression finds them in a microsecond. Numbers by rank are parsed for the steps that `KeptRows` wants, and for
the slowest step of each column. So in a long run most lines are not parsed as a whole, nor checked.

A directory may come from a stranger: nothing in it is executed, and a number that is no measurement counts as unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from evener.core.os_errors import storage_errors
from evener.errors import DataError
from evener.files import LONGEST_LINE, open_regular, parsed
from evener.tools.report.columns import Bins, KeptRows, Numbers, known_numbers

_NUMBER = rb"(-?\d{1,20}(?:\.\d{1,20})?(?:[eE][-+]?\d{1,3})?)"
_STEP = re.compile(
    rb'\{"kind": "step", "step": (\d{1,15}), "epoch": (\d{1,15}), "loss": %b, "samples": (\d{1,15}), "seconds": %b, "'
    % (_NUMBER, _NUMBER)
)
MOST_READ_RANKS = 1 << 17
"""A record with more ranks is refused."""
_MOST_NUMBERS = 7680
"""Columns times ranks. With up to 16 ranks there are 480 columns."""
_LEAST_COLUMNS, _MOST_COLUMNS = 60, 480

STEP, EPOCH, LOSS, SAMPLES, SECONDS, POSITION, PLACE = range(7)
"""Fields of `Steps.bins`. The position is that among the steps of the file, the place that of the line in bytes."""
FIELDS = (
    "shares",
    "compute_seconds",
    "wait_seconds",
    "input_seconds",
    "forward_seconds",
    "memory_peak",
    "memory_held",
)
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
    """The last record of a step that was parsed as a whole."""
    rates: list[tuple[int, float]] = field(default_factory=list)
    """Learning rates, each with its position among the steps."""
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
        path: The file.
        other: Called with each record that is not of a step.
        parts: For each rank, the part of the batch that it computes; if empty, each rank has its own.
        looks: Called with each step that is parsed as a whole.
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

    def read(self) -> Steps:
        """Reads the file.

        Raises:
            DataError: If a line that was parsed is no record. The message names it.
            StorageError: If the file cannot be read.
        """
        with storage_errors(f"the records in {self._path} cannot be read"), open_regular(self._path) as file:
            line_number = place = 0
            while line := file.readline(LONGEST_LINE):
                line_number += 1
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:  # still being written
                    break
                try:
                    self._add(line, place)
                except (ValueError, TypeError, KeyError, OverflowError) as error:
                    raise DataError(
                        f"{self._path}, line {line_number} is no record: {_reason(error)}"
                    ) from error
                place += len(line)
            self._steps.bins.close()
            self._read_extremes(file)
        return self._steps

    def _add(self, line: bytes, place: int) -> None:
        found, steps = _STEP.match(line), self._steps
        position = self._position
        if found is not None and position % steps.kept.every:
            step, epoch, loss, samples, seconds = map(float, found.groups())
        else:
            record = parsed(line.decode())
            if not isinstance(record, dict):
                raise TypeError(f"it is a {type(record).__name__}")
            if record.get("kind") != "step":
                self._other(record)
                return
            scalars = [record[name] for name in ("step", "epoch", "loss", "samples", "seconds")]
            step, epoch, loss, samples, seconds = map(number, scalars)
            if not step >= 0 or not samples >= 0:
                raise ValueError("its step or its number of samples is no number")
            if position % steps.kept.every == 0:
                self._keep(position, record)
        if step <= self._greatest:
            steps.repeated += 1
            steps.repeated_seconds += seconds if seconds >= 0 else 0.0
        else:
            self._greatest = step
        self._position += 1
        steps.bins.add((step, epoch, loss, samples, seconds if seconds >= 0 else math.nan, position, place))

    def _keep(self, position: int, record: dict[str, Any]) -> None:
        row = self._row(record)
        if position == 0:
            self._steps.bins.limit(columns_for(row.shape[1]))
        self._steps.kept.add(position, row)
        self._steps.rates.append((position, number(record.get("lr"))))
        self._steps.last = record
        self._looks(record)

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

    def _read_extremes(self, file: BinaryIO) -> None:
        """Reads the slowest step of each column once more, unless it was kept."""
        known = set(self._steps.kept.steps)
        for slowest in self._steps.bins.slow:
            position = int(slowest[POSITION])
            if position not in known:
                file.seek(int(slowest[PLACE]))
                record = parsed(file.readline(LONGEST_LINE).decode())
                self._steps.extremes.add(position, self._row(record))


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)
