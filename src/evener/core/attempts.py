"""The attempts of a run: ``attempts.jsonl`` says when its ranks were started, what ended them, and how long saves took.

The file is only ever appended to, also when the records of steps that are repeated go, and also by the launcher, which
alone knows how a rank has died. It is no part of the training: what cannot be written here ends no run.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from evener.core.records import RunStart, as_json
from evener.files import dumps

ATTEMPTS = "attempts.jsonl"
"""Name of the file in a run directory."""
_LONGEST_WORDS = 4000


@dataclass(frozen=True)
class StartRecord:
    """A start of the ranks: the first one, or one after a resume or a fault."""

    kind: ClassVar[str] = "start"
    step: int
    """Steps done before."""
    started: float
    """Begin of the training, in seconds since the epoch."""
    startup_seconds: float | None
    """Seconds from the start of the ranks until then."""
    run: dict[str, Any]
    """Fields of `RunStart`, by name."""
    lost_steps: int = 0
    """Steps that were in the records already, and are repeated because no checkpoint has them."""
    lost_seconds: float = 0.0
    """Seconds that these had taken."""

    @classmethod
    def of_run(
        cls, run: RunStart, started: float, lost_steps: int = 0, lost_seconds: float = 0.0
    ) -> StartRecord:
        """Returns the record of a start, without the settings, which are in a file of their own."""
        fields = {name: value for name, value in as_json(run).items() if name not in ("settings", "run_dir")}
        return cls(run.steps_done, started, run.startup_seconds, fields, lost_steps, lost_seconds)


@dataclass(frozen=True)
class SaveRecord:
    """A save, as far as training waited for it."""

    kind: ClassVar[str] = "save"
    step: int
    """Steps done before."""
    seconds: float
    """Seconds for which training stopped."""


@dataclass(frozen=True)
class FaultRecord:
    """What ended the ranks, or one of them."""

    kind: ClassVar[str] = "fault"
    cause: str
    """``death`` of a rank, ``hang``, or ``error``."""
    rank: int | None
    """The rank that is the cause. None if not known."""
    words: str


def append_attempt(run_dir: Path, record: StartRecord | SaveRecord | FaultRecord) -> None:
    """Appends a record to the file in a run directory. Does nothing if that cannot be done.

    Only a start makes the file: when a save or a fault is told, another directory may be where the run's was.
    """
    line = (dumps(as_json(record)) + "\n").encode()
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        flags |= os.O_CREAT if isinstance(record, StartRecord) else 0
        number = os.open(run_dir / ATTEMPTS, flags, 0o666)  # as the other files: the umask decides
        try:
            os.write(number, line)
        finally:
            os.close(number)


def fault_record(error: BaseException, words: str = "") -> FaultRecord:
    """Returns the record of an error that has ended the ranks.

    Args:
        words: A description that says more than the first line of the error; empty for that line.
    """
    text = words or str(error) or type(error).__name__
    cause = "hang" if isinstance(error, TimeoutError) else "error"
    return FaultRecord(cause, getattr(error, "rank", None), text[:_LONGEST_WORDS])
