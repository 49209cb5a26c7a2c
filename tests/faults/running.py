"""A fault, what was promised of it, and whether that came true of the whole command."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.distributed.processes import Ended, await_files, end, start_command
from tests.tiers import NIGHTLY, SLOW
from tests.warm import Warm

START_SECONDS = 60.0
"""A command on a busy machine takes so long to start its ranks; it counts to no promise."""
QUIET_START_SECONDS = 2.0
"""How long a command takes that finds PyTorch imported, on two cores of which nobody else wants anything."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a run, and how it must end."""

    name: str
    task: str
    """Of :mod:`tests.faults.tasks`, or ``module:function``; it touches the file ``fault`` of its directory when the
    fault begins."""
    status: int
    words: tuple[str, ...]
    """Regular expressions that standard error must hold, each once or more."""
    seconds: float
    """How long after its fault the run may last, on a machine that has nothing else to do."""
    arguments: tuple[str, ...] = ()
    signals: tuple[tuple[float, signal.Signals], ...] = ()
    """What the launcher gets: so many seconds after the file ``fault`` is there, this signal."""
    never: tuple[str, ...] = field(default=("Traceback",))
    """What standard error must not hold."""

    def __str__(self) -> str:
        return self.name


def rows(*faults: Fault, slow: Sequence[str] = ()) -> list[object]:
    """Parameters of a test: those whose names are in ``slow``, by default all, are slow, and the others nightly."""
    assert set(slow) <= {fault.name for fault in faults}
    return [
        pytest.param(
            fault,
            id=fault.name.replace(" ", "-"),
            marks=SLOW if not slow or fault.name in slow else NIGHTLY,
        )
        for fault in faults
    ]


def suffer(fault: Fault, directory: Path, processes: int = 2) -> Ended:
    """``evener train`` with the fault, in a directory of its own; fails where the promise is not kept.

    The command and its ranks are processes of their own, which find PyTorch imported."""
    began = time.monotonic()
    program = start_command(*command(fault, directory, processes))
    if fault.signals:
        await_files(directory / "fault")
        for delay, number in fault.signals:
            time.sleep(delay)
            os.kill(program.pid, number)
    ended = end(program, START_SECONDS + fault.seconds + 60)
    lasted = time.monotonic() - began
    check(fault, ended, directory, lasted)
    return ended


def suffer_warm(fault: Fault, directory: Path, warm: Warm, printed: pytest.CaptureFixture[str]) -> Ended:
    """As ``suffer``, of a fault that all ranks tell of and survive: on ranks that are up already."""
    began = time.monotonic()
    status = warm.status("evener", *command(fault, directory))
    ended = Ended(status, *printed.readouterr())
    check(fault, ended, directory, time.monotonic() - began)
    return ended


def command(fault: Fault, directory: Path, processes: int = 2) -> tuple[str, ...]:
    """Of a run in the directory, where its task says when the fault begins."""
    os.environ["EVENER__TESTS_FAULT"] = str(directory / "fault")
    settings = ("--processes", str(processes), "--device", "cpu", "--run-dir", str(directory / "run"))
    task = fault.task if ":" in fault.task else f"tests.faults.tasks:{fault.task}"
    return ("train", task, *settings, *fault.arguments)


def check(fault: Fault, ended: Ended, directory: Path, lasted: float) -> None:
    """Fails where the promise is not kept. A machine that was slow to come to the fault may be as slow after it."""
    if (directory / "fault").exists():
        since = time.time() - (directory / "fault").stat().st_mtime
        assert since < fault.seconds * max(1.0, (lasted - since) / QUIET_START_SECONDS), ended.err
    else:
        assert lasted < START_SECONDS + fault.seconds, ended.err
    assert ended.status == fault.status, ended.err
    for word in fault.words:
        assert re.search(word, ended.err), f"{word!r} is not in\n{ended.err}"
    for word in fault.never:
        assert not re.search(word, ended.err), f"{word!r} is in\n{ended.err}"
