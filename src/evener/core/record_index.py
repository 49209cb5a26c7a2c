"""An index of ``records.jsonl``, with which a reader need not read all of it.

The records of a million steps of 64 ranks are gigabytes of JSON. The index has a short row for each line: its place,
and the first numbers of a step. A reader learns these of all steps at once, and parses only the lines that it wants as
a whole. The index holds nothing that the records do not hold; where it ends early, or is missing, the records are read.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

INDEX = "records.index"
"""Name of the index in a run directory."""
MAGIC = b"evener records 1"
"""First bytes of an index. Another format has another number."""
NUMBERS = ("step", "epoch", "loss", "samples", "seconds")
"""Fields of a step with which its row begins. The place of the line in bytes and `ranks_of` the step follow."""
ROW = struct.Struct(f"<{len(NUMBERS) + 2}d")
BY_RANK = (
    "compute_seconds",
    "wait_seconds",
    "input_seconds",
    "forward_seconds",
    "memory_peak",
    "memory_held",
)
"""Fields of a step that have a number for each rank."""
NO_STEP = -1.0
"""Stands for the ranks of a record that is not of a step."""
_BATCH = 64
"""Rows that are written together. After a kill they are missing, and a reader finds them in the records."""


def ranks_of(record: Mapping[str, Any]) -> int:
    """Returns the number of ranks of which a step has numbers; if of none, the number of its shares."""
    return max(len(record.get(name) or ()) for name in BY_RANK) or len(
        record.get("costs") or record.get("shares") or ()
    )


class RecordIndexWriter:
    """Writes the index of a file of records. An error ends the index, and not the run.

    Args:
        records: The file of records. An index that is there is removed.
    """

    def __init__(self, records: Path) -> None:
        self.steps_done = 0
        """The steps done according to the records."""
        self._rows = bytearray(MAGIC)
        self._number = self._place = 0
        self._file: BinaryIO | None = None
        path = records.with_name(INDEX)
        with suppress(OSError):
            path.unlink(missing_ok=True)
            self._file = path.open("xb", buffering=0)

    def add(self, record: Mapping[str, Any], nbytes: int) -> None:
        """Adds a record.

        Args:
            record: Its fields, with its kind.
            nbytes: Length of its line.
        """
        is_step = record["kind"] == "step"
        if is_step:
            self.steps_done = max(self.steps_done, record["step"] + 1)
        if self._file is None:
            return
        try:
            numbers: Sequence[Any] = [record[name] for name in NUMBERS] if is_step else (0,) * len(NUMBERS)
            known = (float("nan") if each is None else each for each in numbers)
            self._rows += ROW.pack(*known, self._place, ranks_of(record) if is_step else NO_STEP)
        except (KeyError, TypeError, OverflowError, struct.error):  # a line of another version
            self.close()
            return
        self._place += nbytes
        self._number += 1
        if self._number % _BATCH == 0:
            self._flush()

    def _flush(self) -> None:
        rows, self._rows = self._rows, bytearray()
        try:
            if self._file is not None and self._file.write(rows) < len(rows):
                self._end()
        except OSError:
            self._end()

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def close(self) -> None:
        """Writes the last rows, and closes the file."""
        self._flush()
        self._end()
