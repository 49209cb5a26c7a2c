"""Writes the records of a run, and takes over those of an earlier part of it."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

from evener.core.record_index import RecordIndexWriter
from evener.core.records import EvaluationRecord, SkippedStep, StepRecord, as_json
from evener.errors import DataError
from evener.files import LONGEST_LINE, dumps, lines_of, open_regular, parsed, replacing


class RecordFile:
    """Writes records to a file, one JSON object a line. ``write`` passes each line to the system at once, unbuffered.

    Args:
        path: The file; its previous content is replaced.
        steps_done: Steps taken before the run resumes. Earlier records of these steps are kept.
        evaluated: Whether to keep an evaluation after the last of these steps. Otherwise the run repeats it.
        counts_lost: Whether the steps of a file are counted as lost if none of them is kept.
    """

    def __init__(
        self, path: Path, steps_done: int = 0, evaluated: bool = True, counts_lost: bool = False
    ) -> None:
        lost = list[float]()
        with replacing(path) as file, ExitStack() as undo:
            self._index = RecordIndexWriter(path)
            undo.callback(self._index.close)
            if (steps_done or counts_lost) and path.exists():
                lost = _keep(path, file, steps_done, evaluated, self._index)
            undo.pop_all()
        self.lost_steps, self.lost_seconds = len(lost), sum(lost)
        """The number of steps whose records were not kept, and their seconds."""
        self.steps_done = self._index.steps_done
        """Number of steps whose records were kept."""
        self._path, self._file = path, path.open("ab", buffering=0)

    def write(self, record: Any) -> None:
        """Raises:
        OSError: If the disk is full, in which case the file is unchanged; or if the file was removed or moved.
        """
        self._check_place()
        fields = as_json(record)
        line = memoryview((dumps(fields) + "\n").encode())
        nbytes, whole = len(line), os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            self._file.truncate(whole)
            raise
        self._index.add(fields, nbytes)

    def _check_place(self) -> None:
        """Raises FileNotFoundError if the file was removed or moved: otherwise records would be lost silently."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                return
        raise FileNotFoundError(
            errno.ENOENT, "it was removed or moved while the run wrote it", str(self._path)
        )

    def close(self) -> None:
        self._index.close()
        self._file.close()


def _keep(
    path: Path, file: BinaryIO, steps_done: int, evaluated: bool, index: RecordIndexWriter
) -> list[float]:
    """Copies the records of the first ``steps_done`` steps into ``file``, and returns the seconds of each further step.
    A run that was killed may have written such steps, which are not in its checkpoint.
    """
    repeated = None if evaluated else (EvaluationRecord.kind, steps_done)
    lost = list[float]()
    with open_regular(path) as earlier:
        for number, line in enumerate(lines_of(earlier), 1):
            # The run was killed while it wrote this line.
            if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                break
            try:
                record = parsed(line.decode())
                if _steps_at(record) <= steps_done and (record["kind"], record["step"]) != repeated:
                    if steps_done:
                        file.write(line)
                        index.add(record, len(line))
                elif record["kind"] == StepRecord.kind:
                    lost.append(float(record.get("seconds") or 0.0))
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                raise DataError(
                    f"{path}, line {number} is no record: {error}; take the line out, or go on in another directory, "
                    "with --run-dir"
                ) from error
    return lost


def _steps_at(record: dict[str, Any]) -> int:
    """Returns the number of steps done when the record was written."""
    return int(record["step"]) + int(record["kind"] in (StepRecord.kind, SkippedStep.kind))
