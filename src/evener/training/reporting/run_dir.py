"""The run directory. It belongs to one run at a time, and to an earlier run until a new one has begun.

The results of a finished run are replaced only on request. An interrupted run may be started anew in its directory, or
resumed. A directory that has no mark of Evener is refused if a file of the run would replace an existing one.

::

    evener.json     the mark: this directory is Evener's; which run has it, and which launcher started that
    config.json     the settings, resolved
    records.jsonl   a line for each step, evaluation and event, as it happens
    records.index   places and first numbers of these lines, for readers of long runs
    attempts.jsonl  a line for each start of the ranks, each save, and what ended the ranks
    summary.json    the result
    checkpoints/    what the run can resume from
    profile/        traces of its steps, if they are asked for
    .lock           held while a run writes here
    .evener-owner   the process that does, for the error that another one gets
"""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from evener.checkpoint.layout import (
    BEST,
    BEST_VALUE,
    CHECKPOINTS,
    LATEST,
    CheckpointDirectory,
    clear,
    refuse_foreign,
    refuse_unwritable,
    saved_in,
)
from evener.checkpoint.outputs import RUN_FILES
from evener.checkpoint.run_mark import Identity, mark_in, write_mark
from evener.core.attempts import ATTEMPTS, StartRecord, append_attempt, fault_record
from evener.core.elsewhere import shown
from evener.core.observer import Observer
from evener.core.os_errors import FULL, os_error_message, storage_errors
from evener.core.record_file import RecordFile
from evener.core.records import (
    RECORDS,
    EvaluationRecord,
    RunStart,
    RunSummary,
    StepRecord,
    as_json,
)
from evener.core.stdio import unheard
from evener.core.text import counted, few, from_here, printable
from evener.data.shard_counts import COUNTS, are_counts
from evener.distributed.launch.fault_note import note_directory
from evener.distributed.processes import is_alive
from evener.distributed.recovery.regroup import LAUNCH
from evener.distributed.restart_count import generation
from evener.distributed.session import RUN_DIR
from evener.errors import ConfigurationError, StorageError
from evener.files import read_json, read_text, write_json

_LOCK = ".lock"
_OWNER = ".evener-owner"
_OWNED = "process "
"""First word of the owner file."""
_LONGEST_OWNER = 1000
_SUMMARY = "summary.json"
PROFILE = "profile"
"""Directory of the traces of `evener.training.profiling`."""
_WRITTEN = (*RUN_FILES, COUNTS, CHECKPOINTS)
"""Files and directories that a run writes."""


def goes_on_in(run_dir: Path, resume: Path | None) -> bool:
    """Returns True if a run that resumes from ``resume`` is the run in this directory."""
    return resume is not None and (
        str(resume) == "auto" or resume.resolve().is_relative_to(run_dir.resolve())
    )


def refuse_taken(path: Path, goes_on: bool) -> None:
    """Refuses a directory in which a run would replace files that are not its own.

    Args:
        goes_on: Whether the run resumes the run in the directory.

    Raises:
        ConfigurationError: If a finished run is there, or an unmarked directory holds files with names of a run's.
    """
    if mark_in(path) is not None:
        if not goes_on:
            refuse_finished(path)
        return
    taken = [name for name in _WRITTEN if _is_taken(path / name)]
    if taken and not (goes_on and saved_in(path / CHECKPOINTS)):
        raise ConfigurationError(
            f"{shown(path)} is not the directory of a run that Evener marked as its own, and has {few(taken)}, which "
            "the run would replace: name another directory with --run-dir, or have them replaced with --overwrite"
        )


def _is_taken(path: Path) -> bool:
    if path.name == COUNTS and are_counts(path):  # of a run that ended while it counted
        return False
    return any(path.iterdir()) if path.is_dir() else os.path.lexists(path) and path.name != CHECKPOINTS


def refuse_finished(path: Path) -> None:
    """Refuses a directory with the summary of a run that was not interrupted.

    Raises:
        ConfigurationError: If there is one.
    """
    if _is_finished(path / _SUMMARY):
        raise ConfigurationError(
            f"{shown(path)} holds a finished run: name another directory with --run-dir, go on with that run with "
            f"--resume {shown(path)}, or replace it with --overwrite"
        )


def _is_finished(summary: Path) -> bool:
    try:
        return not read_json(summary).get("interrupted", False)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError):  # an unknown kind of summary, which must not be replaced
        return True


class RunDirectory:
    """Holds a directory for one run, from ``__enter__`` to ``__exit__``.

    Args:
        replaces: Whether existing files may be replaced.
        goes_on: Whether the run resumes the one that is there.

    Raises:
        ConfigurationError: When entered, if another run writes there or has finished there, or it is no directory.
    """

    def __init__(self, path: Path, replaces: bool = False, goes_on: bool = False) -> None:
        self.path, self._replaces, self._goes_on = path, replaces, goes_on
        self._lock = FileLock(path / _LOCK, timeout=0)
        self._tells_owner = False

    def __enter__(self) -> RunDirectory:
        self._check()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            raise ConfigurationError(
                f"another run writes to {shown(self.path)} ({self._owner()}): name another directory with "
                "--run-dir, or wait for its end"
            ) from None
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot hold a run: {os_error_message(error)}") from error
        try:
            self._claim()
        except BaseException:
            self._lock.release()
            raise
        return self

    def _check(self) -> None:
        if not self._replaces:
            refuse_taken(self.path, self._goes_on)
        refuse_unwritable(self.path / CHECKPOINTS)
        if not self._goes_on:
            refuse_foreign(self.path / CHECKPOINTS)

    def _claim(self) -> None:
        """Checks again, now that the lock keeps other runs out, and writes the owner file."""
        self._check()
        if mark_in(self.path):
            self._remove_torn()
        with storage_errors(f"{self.path} cannot hold a run"):
            if self._replaces and not self._goes_on:  # another run's, whose openers may have been others
                (self.path / COUNTS).unlink(missing_ok=True)
            self._tell_owner()

    def _remove_torn(self) -> None:
        """Removes what a writer has left that was killed."""
        places = (
            (self.path, _WRITTEN),
            (self.path / CHECKPOINTS, (LATEST, BEST, BEST_VALUE)),
        )
        for place, names in places:
            for path in (each for name in names for each in place.glob(f".{name}.*")):
                if re.fullmatch(r"\.[0-9]+", path.suffix) and path.stem[1:] in names:
                    path.unlink(missing_ok=True)

    def _tell_owner(self) -> None:
        """Replaces the owner file of an earlier run, even if it is a link or a pipe. Another program's file stays."""
        path = self.path / _OWNER
        if mark_in(self.path) is not None or self._owner().startswith(_OWNED):
            path.unlink(missing_ok=True)
        with suppress(FileExistsError), path.open("x") as file:
            file.write(f"{_OWNED}{os.getpid()} on {socket.gethostname()}\n")
            self._tells_owner = True

    def _owner(self) -> str:
        try:
            return printable(read_text(self.path / _OWNER, _LONGEST_OWNER)).strip()
        except (OSError, ValueError):
            return "of an unknown process"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tells_owner:
            (self.path / _OWNER).unlink(missing_ok=True)
        self._lock.release()


def has_ended(path: Path) -> bool:
    """Returns True if the run in the directory has written its summary, at its end or because it was interrupted."""
    return (path / _SUMMARY).exists()


def is_held(path: Path) -> bool:
    """Returns True if a run writes to the directory, as far as this host can tell. Does not take the lock, which the
    run may be about to take again."""
    try:
        owner = read_text(path / _OWNER, _LONGEST_OWNER).strip()
    except (OSError, ValueError):
        return False
    pid, _, host = owner.removeprefix(_OWNED).partition(" on ")
    return host != socket.gethostname() or (pid.isdecimal() and is_alive(int(pid)))


def _say(text: str) -> None:
    print(f"evener: {text}", file=unheard(sys.stderr), flush=True)


class Records(Observer):
    """Writes settings, records and summary into a directory that the run holds.

    Args:
        goes_on: Whether the run resumes the one in the directory. Otherwise its records are replaced.
        replaces: Whether to remove the checkpoints of an earlier run at once. Otherwise they are removed when this run
            has its own.
        run: Returns the identity of the run, and of those that it continues.
        is_evaluated: Returns False if the evaluation after the last step is still due, and will be done once more.
        stops: Whether a full disk, or a removed directory, ends the run. Otherwise it continues without the records
            that cannot be written, and writes again as soon as that works, unless another run's directory is there.
        say: Called once with a message about that.

    Raises:
        StorageError: When a record cannot be written.
    """

    def __init__(
        self,
        path: Path,
        goes_on: bool = False,
        stops: bool = True,
        say: Callable[[str], None] = _say,
        *,
        replaces: bool = False,
        run: Callable[[], Identity] = Identity,
        is_evaluated: Callable[[], bool] = lambda: True,
    ) -> None:
        self._path, self._goes_on, self._stops, self._say = path, goes_on, stops, say
        self._replaces, self._run, self._is_evaluated = replaces, run, is_evaluated
        self._file: RecordFile | None = None
        self._mark, self._lost = mark_in(path), 0

    def start(self, run: RunStart) -> None:
        with storage_errors(f"no run can begin in {self._path}"):
            if not self._goes_on:
                (self._path / _SUMMARY).unlink(missing_ok=True)
            again = self._goes_on or (generation() > 0 and is_of_this_launch(self._path))
            if not again:
                (self._path / ATTEMPTS).unlink(missing_ok=True)
            if self._replaces and not self._goes_on:
                clear(self._path / CHECKPOINTS)
                for trace in (self._path / PROFILE).glob("step-*/rank*.json.gz"):
                    trace.unlink(missing_ok=True)
            write_mark(self._path, {**self._run().as_plain(), "launch": launch_name()})
            self._mark = mark_in(self._path)
            write_json(self._path / "config.json", run.settings)
            self._file = RecordFile(
                self._path / RECORDS, run.steps_done if self._goes_on else 0, self._is_evaluated(), again
            )
            # Not before: a run that is refused for its records keeps its summary.
            (self._path / _SUMMARY).unlink(missing_ok=True)
        lost = self._file.lost_steps, self._file.lost_seconds
        append_attempt(self._path, StartRecord.of_run(run, time.time(), *lost))
        note_directory(self._path)

    def catch_up(self, records: Iterable[StepRecord]) -> None:
        """Writes steps that the file lacks because the rank that should have written them has died."""
        known = self._file.steps_done if self._file is not None else 0
        for record in records:
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
                f"{counted(self._lost, 'record')} of this run are not in {self._path}, where they could not be written"
            )
        if summary is not None:
            self._do(lambda: write_json(self._path / _SUMMARY, as_json(summary)))

    def failed(self, error: BaseException) -> None:
        """Writes down the error that ended the run, if the run has begun: before that, the directory has no mark, and
        with a file named like a run's it would be refused the next time."""
        if is_of_this_launch(self._path):
            append_attempt(self._path, fault_record(error))

    def _write(self, record: Any) -> None:
        file = self._file
        assert file is not None, "the run has not begun"
        self._do(lambda: file.write(record))

    def _do(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            said = f"the records cannot be written to {from_here(self._path)}: {os_error_message(error)}"
            if mark_in(self._path) not in (None, self._mark):  # whose checkpoints saves would replace
                raise StorageError(f"{said}, and another run's directory is there now") from error
            if self._stops or error.errno not in (*FULL, errno.ENOENT):
                raise StorageError(f"{said}. To train on without them give --on-full-disk go-on") from error
            if not self._lost:
                self._say(f"{said}. The run goes on without them")
            self._lost += 1


def launch_name() -> str:
    """Returns a name for the launch of this process, which stays the same when its ranks are started again."""
    private = os.environ.get(LAUNCH) or os.environ.get(RUN_DIR)
    if private:
        return private
    parent = os.getppid()
    try:
        begun = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        begun = ""
    return f"{socket.gethostname()} {parent} {begun}"


def earlier_runs_message(saved: Sequence[CheckpointDirectory]) -> str:
    """Describes what happens to checkpoints of an earlier run in the directory. Returns "" if there are none."""
    names = [each.path.name for each in saved]
    if not names:
        return ""
    return (
        f"begins anew: {few(names)} in {saved[0].path.parent} are of an earlier run, and go when this one has saved as "
        f"many as --keep says. To go on from them instead, stop this run and give --resume {saved[0].path}"
    )


def is_of_this_launch(path: Path) -> bool:
    """Returns True if this process's launcher, which has started its ranks again, began the run in the directory."""
    mark = mark_in(path)
    return mark is not None and mark.get("launch") == launch_name()


def new_run_dir(task_name: str, now: float, home: Path) -> Path:
    """Makes a new directory ``home/TASK-TIME``, with a number added if that exists, and returns it."""
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
            raise ConfigurationError(f"{home} cannot hold a run: {os_error_message(error)}") from error
        else:
            return path
