"""The directory that a run leaves: of one run at a time, and an earlier one's until the new one has begun.

::

    config.json     the settings, resolved
    records.jsonl   a line for each step, evaluation and event, as it happens
    summary.json    the result
    checkpoints/    what the run can go on from
    .lock           held while a run writes here
    .owner          the process that does, for the error that another one gets
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from evener.errors import ConfigurationError
from evener.observer import Observer
from evener.records import EvaluationRecord, RecordFile, RunStart, RunSummary, StepRecord, as_json, write_json

CHECKPOINTS = "checkpoints"
_LOCK = ".lock"
_OWNER = ".owner"


class RunDirectory:
    """Holds a directory for one run, from ``__enter__`` to ``__exit__``.

    Raises:
        ConfigurationError: When entered, if another run writes there or it is no directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / _LOCK, timeout=0)

    def __enter__(self) -> RunDirectory:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            raise ConfigurationError(
                f"another run writes to {self.path} ({self._owner()}): name another directory with --run-dir, or wait "
                "for its end"
            ) from None
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot hold a run: {error}") from error
        (self.path / _OWNER).write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        return self

    def _owner(self) -> str:
        try:
            return (self.path / _OWNER).read_text().strip()
        except OSError:
            return "of an unknown process"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (self.path / _OWNER).unlink(missing_ok=True)
        self._lock.release()


class Records(Observer):
    """Writes settings, records and summary into a directory that the run holds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: RecordFile | None = None

    def start(self, run: RunStart) -> None:
        (self._path / "summary.json").unlink(missing_ok=True)  # an earlier run's; this one's comes at its end
        write_json(self._path / "config.json", run.settings)
        self._file = RecordFile(self._path / "records.jsonl", run.steps_done)

    def step(self, record: StepRecord) -> None:
        self._write(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._write(record)

    def event(self, record: Any) -> None:
        self._write(record)

    def end(self, summary: RunSummary | None) -> None:
        if summary is not None:
            write_json(self._path / "summary.json", as_json(summary))
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: Any) -> None:
        assert self._file is not None, "the run has not begun"
        self._file.write(record)


def new_run_dir(task_name: str, now: float, home: Path) -> Path:
    """A directory that no other run has, made now: ``home/TASK-TIME``, with a number where that is taken."""
    label = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in task_name)
    stem = f"{label}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
    number = 1
    while True:
        path = home / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return path
