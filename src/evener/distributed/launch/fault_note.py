"""Notes in the directory of a run what has ended its ranks: the launcher alone knows how a rank has died.

Rank 0 tells the launcher where the run directory is, in a file of the launcher's private directory.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from evener.core.attempts import FaultRecord, append_attempt, fault_record
from evener.distributed.failure import Failure
from evener.distributed.session import RUN_DIR
from evener.errors import EvenerError

DIRECTORY_NOTE = "run-directory"
"""Name of the file in the private directory."""
_DIED = ("killed", "exit")
_noted: tuple[Path, int] | None = None
"""The run directory of a run of this process or of ranks that it has launched, if it is known, and its inode."""


def noted_directory() -> Path | None:
    """Returns the directory of the last run of this process, or of ranks that have failed; None if there is none, or
    another one has taken its place."""
    with suppress(OSError):
        if _noted is not None and _noted[0].stat().st_ino == _noted[1]:
            return _noted[0]
    return None


def note_directory(run_dir: Path) -> None:
    """Tells the launcher of this rank, if there is one, where the run directory is."""
    global _noted
    with suppress(OSError):
        _noted = run_dir, run_dir.stat().st_ino
    private = os.environ.get(RUN_DIR)
    if private is not None:
        with suppress(OSError):
            write_directory_note(Path(private), run_dir)


def write_directory_note(private: Path, run_dir: Path) -> None:
    """Writes down where the run directory is, and its inode: another one may be there when the ranks end."""
    (private / DIRECTORY_NOTE).write_bytes(os.fsencode(f"{run_dir.stat().st_ino} {run_dir}"))


def note_fault(private: Path, failure: Failure, found: EvenerError | None = None) -> None:
    """Appends a fault to the attempts of the run, if its directory is known. A stop by a signal is no fault.

    Args:
        private: The launcher's private directory.
        failure: The failure that caused the others.
        found: The error for which the launcher itself has ended the ranks; None if it has not.
    """
    global _noted
    if failure.kind == "interrupted" and found is None:
        return
    with suppress(OSError, ValueError):
        inode, _, place = os.fsdecode((private / DIRECTORY_NOTE).read_bytes()).partition(" ")
        _noted = Path(place), int(inode)
        run_dir = noted_directory()
        if run_dir is None:
            return
        record = fault_record(found or failure.to_error())
        died = found is None and failure.kind in _DIED
        append_attempt(run_dir, FaultRecord("death", failure.rank, record.words) if died else record)
