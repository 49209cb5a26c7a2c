"""One run of a script on one rank, watched; and several at once, each on one device or all together."""

from __future__ import annotations

import inspect
import os
import pickle
import random
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
from evener.tools.verify_script.events import Line, Lines, Record
from evener.tools.verify_script.printed_output import Listening
from evener.tools.verify_script.recorder import Plan, Recorder
from evener.tools.verify_script.workplace import workplace

_AT_ONCE = 4
"""Runs on one device at the same time."""
_HASTE = 1000.0
"""By how much faster the clock of a disturbed run goes."""
_CLOCKS = ("time", "perf_counter", "monotonic")


@dataclass(frozen=True)
class Script:
    """A script and its command line."""

    path: Path
    """Absolute."""
    args: tuple[str, ...] = ()
    timeout_seconds: float = 300.0
    """For which ranks wait for each other."""


class ScriptError(EvenerError):
    """The script ended with an error, or with a status that is none of success."""

    def __init__(self, message: str, line: Line | None, refused: bool) -> None:
        super().__init__(message, line, refused)
        self.message = message
        self.line = line
        """Of the script."""
        self.refused = refused
        """Whether Evener refused what the script does."""

    def __str__(self) -> str:
        return str(self.args[0])


def alone(script: Script, plans: Sequence[Plan]) -> list[Record]:
    """Runs on one device, one for each plan, some at the same time.

    Raises:
        EvenerError: If one ended with an error; a :class:`ScriptError` where the script raised it.
    """
    found: list[Record] = []
    for start in range(0, len(plans), _AT_ONCE):
        part = plans[start : start + _AT_ONCE]
        part = [*part, *part[-1:]] if len(part) == 1 else part  # a single one would run in this process
        found += _launched(script, part, len(part))
    return found[: len(plans)]


@dataclass(frozen=True)
class Together:
    """One run on several ranks."""

    records: list[Record]
    """Of each rank, where there is an error as far as it came; empty if one was left by none."""
    error: EvenerError | None = None
    """With which it ended; a :class:`ScriptError` where the script raised it."""


def together(script: Script, plan: Plan, processes: int) -> Together:
    """One run on so many ranks."""
    with workplace() as directory, tempfile.TemporaryDirectory() as left:
        try:
            return Together(_launched(script, [plan], processes, str(directory), left))
        except EvenerError as error:
            return Together(_left(Path(left), processes), error)


def _left(directory: Path, processes: int) -> list[Record]:
    files = [directory / str(rank) for rank in range(processes)]
    return [pickle.loads(file.read_bytes()) for file in files] if all(map(Path.exists, files)) else []


def _leave(record: Record, directory: str, rank: int) -> None:
    file = Path(directory, f"{rank}.new")
    with suppress(OSError):  # as of a directory that is gone
        file.write_bytes(pickle.dumps(record))
        file.replace(Path(directory, str(rank)))


def _launched(
    script: Script, plans: Sequence[Plan], processes: int, directory: str = "", left: str = ""
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


def record_script(script: Script, plans: list[Plan], directory: str = "", left: str = "") -> Record:
    """On a rank: runs the script by its plan, or by that of all; in ``directory``, or one of its own.

    Args:
        left: A directory in which the record is left if the script ends with an error.

    Raises:
        ScriptError: If the script raised an error; those that follow from another rank's are raised as they are.
    """
    rank = detect().rank
    plan = plans[rank % len(plans)]
    lines = Lines(script.path.parent)
    recorder = Recorder(plan, lines)
    output = Listening(lines.here, lambda: len(recorder.record.events))
    with ExitStack() as stack:
        place = directory or str(stack.enter_context(workplace()))
        stack.enter_context(_as_a_program(script, place, plan.alone))
        stack.enter_context(redirect_stdout(output))
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
            raise _told(error, rank, lines) from error
    output.finish()
    recorder.record.printed = output.printed
    return recorder.record


def _run(script: Script) -> None:
    """Until its end, which may be ``sys.exit()``."""
    try:
        run_file(str(script.path))
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def _told(error: BaseException, rank: int, lines: Lines) -> BaseException:
    """The error with the line of the script where it was raised."""
    line = lines.of_error(error)
    if isinstance(error, Exception) and is_communication_error(error):
        if isinstance(error, RankTimeoutError) and line is not None:
            return RankTimeoutError(f"{error} (at {line.told})")
        return error
    if isinstance(error, EvenerError):
        return ScriptError(said(error), line, refused=True)
    return ScriptError(failure_of(error, rank).message, line, refused=False)


@contextmanager
def _as_a_program(script: Script, directory: str, is_alone: bool) -> Iterator[None]:
    """The process is one that runs the script, in ``directory``; afterwards it is what it was."""
    where, modules, main = os.getcwd(), set(sys.modules), sys.modules.get("__main__")
    path = [str(script.path.parent), *sys.path]
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
            _forget(set(sys.modules) - modules, script.path.parent)


def _forget(names: set[str], home: Path) -> None:
    """Modules of the script's directory."""
    below = str(home) + os.sep
    for name in names:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(below):
            del sys.modules[name]


def _seed(seed: int) -> None:
    """One device and rank 0 draw the same where the script sets no seed; other ranks draw other numbers, as in life."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def _disturbed_surroundings(lines: Lines) -> Iterator[None]:
    """The script's own files find that time flies, so that what they print of it is told from what they compute; and
    nobody reads once more what it says on standard error."""

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
