"""The directory that a run leaves: of one run at a time, and an earlier one's until the new one has begun.

What a finished run left is replaced only where that was asked for. A run that was cut short may be begun anew in its
directory, or gone on with.

::

    config.json     the settings, resolved
    records.jsonl   a line for each step, evaluation and event, as it happens
    summary.json    the result
    checkpoints/    what the run can go on from
    .lock           held while a run writes here
    .owner          the process that does, for the error that another one gets
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from evener.errors import ConfigurationError, StorageError
from evener.observer import Observer
from evener.records import (
    RECORDS,
    EvaluationRecord,
    RecordFile,
    RunStart,
    RunSummary,
    StepRecord,
    as_json,
    write_json,
)
from evener.streams import unheard
from evener.system import FULL, in_words, words

CHECKPOINTS = "checkpoints"
_LOCK = ".lock"
_OWNER = ".owner"
_SUMMARY = "summary.json"


def goes_on_in(run_dir: Path, resume: Path | None) -> bool:
    """Whether a run that goes on from ``resume`` is the one whose directory this is."""
    return resume is not None and (
        str(resume) == "auto" or resume.resolve().is_relative_to(run_dir.resolve())
    )


def refuse_finished(path: Path) -> None:
    """Raises:
    ConfigurationError: If a run that was not cut short has left its summary there.
    """
    if _is_finished(path / _SUMMARY):
        raise ConfigurationError(
            f"{path} holds a finished run: name another directory with --run-dir, go on with that run with "
            f"--resume {path}, or replace it with --overwrite"
        )


def _is_finished(summary: Path) -> bool:
    try:
        return not json.loads(summary.read_text()).get("interrupted", False)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError):  # of a run of an unknown kind, which is not ours to replace
        return True


class RunDirectory:
    """Holds a directory for one run, from ``__enter__`` to ``__exit__``.

    Args:
        replaces: Whether what a finished run left there may be replaced or gone on with.

    Raises:
        ConfigurationError: When entered, if another run writes there or has finished there, or it is no directory.
    """

    def __init__(self, path: Path, replaces: bool = False) -> None:
        self.path, self._replaces = path, replaces
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
            raise ConfigurationError(f"{self.path} cannot hold a run: {words(error)}") from error
        try:
            self._claim()
        except BaseException:
            self._lock.release()
            raise
        return self

    def _claim(self) -> None:
        """Now that no other run can finish here."""
        if not self._replaces:
            refuse_finished(self.path)
        for torn in self.path.glob(".*.json*.*"):  # of a writer that was killed
            torn.unlink(missing_ok=True)
        with in_words(f"{self.path} cannot hold a run"):
            (self.path / _OWNER).write_text(f"process {os.getpid()} on {socket.gethostname()}\n")

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


def _say(text: str) -> None:
    print(f"evener: {text}", file=unheard(sys.stderr), flush=True)


class Records(Observer):
    """Writes settings, records and summary into a directory that the run holds.

    Args:
        goes_on: Whether the run goes on with the one whose directory it is; else nothing of an earlier one stays, its
            checkpoints neither: a later run would go on from them with other settings.
        stops: Whether a full disk ends the run; else it goes on without the records for which there is no room, and
            writes again when there is.
        say: Told of that, once.

    Raises:
        StorageError: While the run is told of, if something cannot be written.
    """

    def __init__(
        self, path: Path, goes_on: bool = False, stops: bool = True, say: Callable[[str], None] = _say
    ) -> None:
        self._path, self._goes_on, self._stops, self._say = path, goes_on, stops, say
        self._file: RecordFile | None = None
        self._lost = 0

    def start(self, run: RunStart) -> None:
        with in_words(f"no run can begin in {self._path}"):
            (self._path / _SUMMARY).unlink(missing_ok=True)  # an earlier run's; this one's comes at its end
            if not self._goes_on and (self._path / "checkpoints").exists():
                shutil.rmtree(self._path / "checkpoints")
            write_json(self._path / "config.json", run.settings)
            self._file = RecordFile(self._path / RECORDS, run.steps_done if self._goes_on else 0)

    def catch_up(self, told: Iterable[StepRecord]) -> None:
        """Writes the steps that the file lacks: the rank that was to write them has died."""
        known = self._file.steps_done if self._file is not None else 0
        for record in told:
            if record.step >= known:
                self._write(record)

    def step(self, record: StepRecord) -> None:
        self._write(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._write(record)

    def event(self, record: Any) -> None:
        self._write(record)

    def end(self, summary: RunSummary | None) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None
        if self._lost:
            self._say(
                f"{self._lost:,} records of this run are not in {self._path}, for which there was no room"
            )
        if summary is not None:
            self._do(lambda: write_json(self._path / _SUMMARY, as_json(summary)))

    def _write(self, record: Any) -> None:
        file = self._file
        assert file is not None, "the run has not begun"
        self._do(lambda: file.write(record))

    def _do(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            said = f"the records cannot be written to {self._path}: {words(error)}"
            if self._stops or error.errno not in FULL:
                raise StorageError(f"{said}. To train on without them give --on-full-disk go-on") from error
            if not self._lost:
                self._say(f"{said}. The run goes on without them")
            self._lost += 1


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
        except OSError as error:
            raise ConfigurationError(f"{home} cannot hold a run: {words(error)}") from error
        else:
            return path
