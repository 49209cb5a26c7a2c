"""Reads the index of a file of records, as far as it fits: records may be edited, and be a stranger's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from evener.core.record_index import MAGIC, NO_STEP, NUMBERS, ROW, ranks_of
from evener.files import LONGEST_LINE, open_regular, parsed
from evener.tools.report.columns import Numbers, known_numbers

MOST_READ_RANKS = 1 << 17
"""A record with more ranks is refused."""
ROW_PLACE, ROW_RANKS = len(NUMBERS), len(NUMBERS) + 1
"""Columns of a row after the `NUMBERS` of a step: the place of its line, and its ranks, or `NO_STEP`."""
CHUNK = 8192
_COMPARED = 256
"""Lines that are compared with the index. An edit that changes the length of a line moves all later ones."""


def rows_of_index(path: Path, records: BinaryIO) -> Iterator[Numbers]:
    """Yields the rows of an index in pieces, up to the last one that can be used. What follows is to be read from the
    records: all of them if there is no index, or if one of the lines that are compared is another.

    Args:
        path: The index.
        records: The file of records. Its position is changed.
    """
    with suppress(OSError), open_regular(path) as file:
        number, before = _fitting(file, records), -1.0
        for first in range(0, number, CHUNK):
            rows = _rows(file, first, min(CHUNK, number - first))
            if not _are_usable(rows, before):
                return
            before = float(rows[-1, ROW_PLACE])
            yield rows


def _rows(file: BinaryIO, first: int, number: int) -> Numbers:
    """Returns rows, with NaN for what is no number."""
    file.seek(len(MAGIC) + first * ROW.size)
    found = np.frombuffer(file.read(number * ROW.size), dtype="<f8").reshape(number, -1)
    return known_numbers(found)


def _are_usable(rows: Numbers, before: float) -> bool:
    """Returns True if the rows can be of records that follow the one at place ``before``."""
    step, _, _, samples, _, places, ranks = rows.T
    rising = (np.diff(places, prepend=before) > 0).all()
    return bool(rising and (step >= 0).all() and (samples >= 0).all() and (ranks <= MOST_READ_RANKS).all())


def _fitting(index: BinaryIO, records: BinaryIO) -> int:
    """Returns the number of rows whose lines are in the records; 0 if one of the compared lines does not fit."""
    if index.read(len(MAGIC)) != MAGIC:
        return 0
    number = (os.fstat(index.fileno()).st_size - len(MAGIC)) // ROW.size
    low = 0
    # The last lines may have come since the records were opened, or are not in a copy of them.
    while low < number:
        middle = (low + number) // 2
        if _line_of(_rows(index, middle, 1)[0], records):
            low = middle + 1
        else:
            number = middle
    compared = np.unique(np.linspace(0, number - 1, min(number, _COMPARED)).astype(int)).tolist()
    fits = all(_fits(_rows(index, at, 1)[0], at, records) for at in compared)
    return number if fits else 0


def _line_of(row: Numbers, records: BinaryIO) -> bytes:
    """Returns the line of a row; empty if it is not there as a whole."""
    if not 0 <= row[ROW_PLACE] < 1 << 60:
        return b""
    records.seek(int(row[ROW_PLACE]))
    line = records.readline(LONGEST_LINE)
    return line if line.endswith(b"\n") else b""


def _fits(row: Numbers, at: int, records: BinaryIO) -> bool:
    """Returns True if the line of a row is as the row says."""
    try:
        record = parsed(_line_of(row, records).decode())
        is_step = record["kind"] == "step"
        numbers = [record[name] for name in NUMBERS] if is_step else [0] * len(NUMBERS)
        told = known_numbers([*numbers, row[ROW_PLACE], ranks_of(record) if is_step else NO_STEP])
    except (ValueError, TypeError, KeyError, OverflowError):
        return False
    return np.array_equal(told, row, equal_nan=True) and (row[ROW_PLACE] > 0) == (at > 0)
