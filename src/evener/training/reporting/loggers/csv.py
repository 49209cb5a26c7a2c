"""Writes a run's numbers as a CSV table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from evener.core.os_errors import storage_errors
from evener.core.records import RunStart, RunSummary
from evener.files import replacing
from evener.training.reporting.loggers import scalars as numbers


class CsvFile(numbers.NumberLogger):
    """Writes one number per line: ``steps,name,value``. ``steps`` is the number of steps taken until then.

    Args:
        path: The file. A resumed run appends to it, and removes its lines about later steps.

    Raises:
        StorageError: At the start, if it cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: BinaryIO | None = None
        self._known = frozenset[tuple[int, str]]()

    def start(self, run: RunStart) -> None:
        with storage_errors(f"the numbers cannot be written to {self._path}"):
            kept = _until(self._path, run.steps_done) if run.steps_done and self._path.is_file() else []
            with replacing(self._path, follow=True) as file:
                file.write(_text([["steps", "name", "value"], *kept]))
            # A run that begins where the one before had evaluated may evaluate there again.
            last = ((int(steps), name) for steps, name, _ in kept)
            self._known = frozenset(row for row in last if row[0] == run.steps_done)
            self._file = self._path.open("ab", buffering=0)  # what is written stays if the run is killed

    def end(self, summary: RunSummary | None) -> None:
        if self._file is not None:
            with storage_errors(f"the numbers cannot be written to {self._path}"):
                self._file.close()
            self._file = None

    def log_numbers(self, steps: int, values: dict[str, float]) -> None:
        assert self._file is not None, "the run has not begun"
        new = {name: value for name, value in values.items() if (steps, name) not in self._known}
        rows = memoryview(_text([steps, name, repr(value)] for name, value in new.items()))
        with storage_errors(f"the numbers cannot be written to {self._path}"):
            while rows:
                rows = rows[self._file.write(rows) :]


def _text(rows: Iterable[Iterable[object]]) -> bytes:
    found = io.StringIO(newline="")
    csv.writer(found).writerows(rows)
    return found.getvalue().encode()


def _until(path: Path, steps_done: int) -> list[list[str]]:
    whole, end, _ = path.read_bytes().rpartition(b"\n")  # behind it is a line that was not written to its end
    lines = io.StringIO((whole + end).decode(), newline="")
    rows = [row for row in csv.reader(lines) if len(row) == 3 and row[0].isdecimal()]
    return [row for row in rows if int(row[0]) <= steps_done]
