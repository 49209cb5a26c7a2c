"""Runs a script with a recorder: single runs on one device, several at a time, or one run on several ranks."""

from __future__ import annotations

import inspect
import os
import pickle
import random
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from evener.core.text import said
from evener.distributed.environment import detect
from evener.distributed.failure import failure_of, is_communication_error
from evener.distributed.launch.launch import launch
from evener.distributed.launch.script import run_file
from evener.distributed.loop_watch import watching
from evener.errors import EvenerError, InterruptedRunError, RankTimeoutError
from evener.tools.verify_script.events import Record, ScriptLine, ScriptLines
from evener.tools.verify_script.link_guard import links_guarded
from evener.tools.verify_script.printed_output import Listening
from evener.tools.verify_script.recorder import RunPlan, ScriptRecorder
from evener.tools.verify_script.workplace import workplace

_AT_ONCE = 4
"""Number of runs on one device at a time."""
_HASTE = 1000.0
"""Factor by which the clock of a disturbed run is faster."""
_CLOCKS = ("time", "perf_counter", "monotonic")


@dataclass(frozen=True)
class ScriptCommand:
    """A script and its command line."""

    path: Path
    """Absolute path."""
    args: tuple[str, ...] = ()
    timeout_seconds: float = 300.0
    """Longest time that ranks wait for each other."""
    module: str = ""
    """Dotted name, if it runs as a module of a package."""

    @property
    def home(self) -> Path:
        """The directory from which the script imports: its own, or the one in which the module's package is."""
        return self.path.parents[self.module.count(".")]


class ScriptError(EvenerError):
    """Raised if the script ended with an error, or with an exit status other than success."""

    def __init__(self, message: str, line: ScriptLine | None, refused: bool) -> None:
        super().__init__(message, line, refused)
        self.message = message
        self.line = line
        """Line of the script. None if the error has none."""
        self.refused = refused
        """True if Evener refused what the script does."""

    def __str__(self) -> str:
        return str(self.args[0])


def alone(script: ScriptCommand, plans: Sequence[RunPlan]) -> list[Record]:
    """Runs the script on one device, once per plan, with several runs at a time.

    Raises:
        EvenerError: If a run ended with an error. It is a :class:`ScriptError` if the script raised it.
    """
    found: list[Record] = []
    for start in range(0, len(plans), _AT_ONCE):
        part = plans[start : start + _AT_ONCE]
        part = [*part, *part[-1:]] if len(part) == 1 else part  # a single one would run in this process
        found += _launched(script, part, len(part))
    return found[: len(plans)]


@dataclass(frozen=True)
class RanksOfScript:
    """Result of one run on several ranks."""

    records: list[Record]
    """Records of all ranks. After an error, they end where it occurred; the list is empty if a rank left no record."""
    error: EvenerError | None = None
    """The error that ended the run, a :class:`ScriptError` if the script raised it. None if the run succeeded."""


def together(script: ScriptCommand, plan: RunPlan, processes: int) -> RanksOfScript:
    """Runs the script once on ``processes`` ranks."""
    with workplace() as directory, tempfile.TemporaryDirectory() as left:
        try:
            return RanksOfScript(_launched(script, [plan], processes, str(directory), left))
        except EvenerError as error:
            return RanksOfScript(_left(Path(left), processes), error)


def _left(directory: Path, processes: int) -> list[Record]:
    files = [directory / str(rank) for rank in range(processes)]
    return [pickle.loads(file.read_bytes()) for file in files] if all(map(Path.exists, files)) else []


def _leave(record: Record, directory: str, rank: int) -> None:
    file = Path(directory, f"{rank}.new")
    with suppress(OSError):  # the directory may have been removed
        file.write_bytes(pickle.dumps(record))
        file.replace(Path(directory, str(rank)))


def _launched(
    script: ScriptCommand, plans: Sequence[RunPlan], processes: int, directory: str = "", left: str = ""
) -> list[Record]:
    return launch(
        record_script,
        script,
        list(plans),
        directory,
        left,
        processes=processes,
        device="cpu",
        timeout_seconds=script.timeout_seconds,
    )


def record_script(script: ScriptCommand, plans: list[RunPlan], directory: str = "", left: str = "") -> Record:
    """Runs the script on this rank and returns its record. Runs in ``directory``, or in a directory of its own.

    Args:
        plans: One plan for all ranks, or one per rank.
        left: Directory in which the record is saved if the script ends with an error. Empty to save none.

    Raises:
        ScriptError: If the script raised an error. Errors that follow from another rank's failure are raised unchanged,
            or with the line of the script added.
    """
    rank = detect().rank
    plan = plans[rank % len(plans)]
    lines = ScriptLines(script.home)
    recorder = ScriptRecorder(plan, lines)
    output = Listening(lines.here, lambda: len(recorder.record.events))
    with ExitStack() as stack:
        place = directory or str(stack.enter_context(workplace()))
        stack.enter_context(_as_a_program(script, place, plan.alone))
        stack.enter_context(links_guarded(Path(place)))
        stack.enter_context(redirect_stdout(output))
        stack.enter_context(output.logged(lines.is_own))
        if plan.disturbed:
            stack.enter_context(_disturbed_surroundings(lines))
        stack.enter_context(watching(recorder))
        _seed(0 if plan.alone else rank)
        try:
            with recorder.listening():
                try:
                    _run(script)
                except (Exception, SystemExit) as error:
                    if not recorder.forgives(error):
                        raise
        except BaseException as error:
            if left:
                _leave(recorder.record, left, rank)
            if isinstance(error, InterruptedRunError | KeyboardInterrupt):
                raise
            raise _with_line(error, rank, lines) from error
    output.finish()
    recorder.record.printed = output.printed
    return recorder.record


def _run(script: ScriptCommand) -> None:
    """Runs the script to its end, which may be a successful ``sys.exit()``."""
    try:
        if script.module:
            runpy.run_module(script.module, run_name="__main__", alter_sys=True)
        else:
            run_file(str(script.path))
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def _with_line(error: BaseException, rank: int, lines: ScriptLines) -> BaseException:
    """Returns the error with the line of the script that raised it."""
    line = lines.of_error(error)
    if isinstance(error, Exception) and is_communication_error(error):
        if isinstance(error, RankTimeoutError) and line is not None:
            return RankTimeoutError(f"{error} (at {line.described})")
        return error
    if isinstance(error, EvenerError):
        return ScriptError(said(error), line, refused=True)
    return ScriptError(failure_of(error, rank).message, line, refused=False)


@contextmanager
def _as_a_program(script: ScriptCommand, directory: str, is_alone: bool) -> Iterator[None]:
    """Sets the process up to run the script as a program in ``directory``, and restores its state afterwards."""
    where, modules, main = os.getcwd(), set(sys.modules), sys.modules.get("__main__")
    path = [str(script.home), *sys.path]
    variables = [] if not is_alone else ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ))
        stack.enter_context(patch.object(sys, "argv", [str(script.path), *script.args]))
        stack.enter_context(patch.object(sys, "path", path))
        for name in variables:
            os.environ.pop(name, None)
        os.chdir(directory)
        try:
            yield
        finally:
            os.chdir(where)
            if main is not None:
                sys.modules["__main__"] = main
            _forget(set(sys.modules) - modules, script.home)


def _forget(names: set[str], home: Path) -> None:
    """Removes the given modules from ``sys.modules`` if they belong to the script's directory."""
    below = str(home) + os.sep
    for name in names:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(below):
            del sys.modules[name]


def _seed(seed: int) -> None:
    """Seeds all random generators. One device and rank 0 get the same seed; other ranks get others, as in a real
    run.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def _disturbed_surroundings(lines: ScriptLines) -> Iterator[None]:
    """Makes clocks run faster for the script's own files, so that printed times differ from those of the reference.
    Discards standard error, which the reference run has shown already.
    """

    def hasty(clock: Callable[[], float]) -> Callable[[], float]:
        began = clock()

        def read() -> float:
            frame = inspect.currentframe()
            caller = frame.f_back if frame is not None else None
            is_own = caller is not None and lines.is_own(caller.f_code.co_filename)
            return began + (clock() - began) * (_HASTE if is_own else 1.0)

        return read

    with ExitStack() as stack:
        stack.enter_context(redirect_stderr(stack.enter_context(open(os.devnull, "w"))))
        for name in _CLOCKS:
            stack.enter_context(patch.object(time, name, hasty(getattr(time, name))))
        yield
