"""Commands, programs that launch ranks, and their ranks, as forks of a process that has imported PyTorch already.

A command on two ranks is three interpreters that import for nine seconds of processor time to train for one. What goes
wrong in a run, who notices, what is said and how all of them end does not depend on how a process came to its modules.
So the program here is a fork of the process whose forks the ranks of ``tests.ranks`` are, in a session of its own with
pipes of its own. Its ranks are what it starts by itself: children, with its bootstrap code, arguments and environment.
They do not hold what the launcher holds, for they are forks of a process that was there before the launcher ran::

    imports ── fork ──▶ program: launches ranks, and inherits orphans
                          └─ fork ──▶ starter ── fork ──▶ fork ──▶ rank, an orphan: a child of the program

How interpreters start is shown by the tests of the launcher, of scripts and of the command line.
"""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import get_spawning_popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import cloudpickle
import numpy
import torch

from evener.torch_internals import interpreter
from tests.ranks import fork_of_imports

STDERR = 2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class _Descriptor:
    """A file descriptor that a fork gets, under another number."""

    number: int

    def __reduce__(self) -> tuple[Any, ...]:
        spawning: Any = get_spawning_popen()
        return _received, (spawning.DupFd(spawning.duplicate_for_child(self.number)),)


def _received(duplicate: Any) -> _Descriptor:
    return _Descriptor(duplicate.detach())


class Fork(subprocess.Popen[str]):
    """A program with arguments, as :class:`subprocess.Popen` would start it with pipes for its output.

    Args:
        program: What it does: a function of a module. Its words are ``sys.argv``.
    """

    _process: BaseProcess

    def __init__(
        self, program: Callable[[], object], words: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        self._program, pipe = program, subprocess.PIPE
        super().__init__(list(words), stdout=pipe, stderr=pipe, text=True, env=variables)

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:
        variables, out, error = given[5], given[12], given[14]
        streams = (_Descriptor(out), _Descriptor(error))
        self._process = fork_of_imports(
            _be_program, self._program, args, dict(variables), os.getcwd(), *streams
        )
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._child_created = True
        for number in (out, error):
            os.close(number)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        self._process.join(0 if wait_flags & os.WNOHANG else None)
        code = self._process.exitcode
        return (0, 0) if code is None else (self.pid, -code if code < 0 else code << 8)

    def ranks(self) -> list[int]:
        """The process ids of the program's ranks; its first child is what starts them."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [int(pid) for pid in children[1:]]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode


def command() -> None:
    """The program ``evener``."""
    from evener.cli.main import command as run

    run()


def module() -> None:
    """The program ``python -m``."""
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def script() -> None:
    """The program ``python``, with a file."""
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


def call() -> None:
    """A program that calls the function in its file and writes there what it returns or raises."""
    path = Path(sys.argv[0])
    function, args, settings = cloudpickle.loads(path.read_bytes())
    try:
        answer = (function(*args, **settings), None)
    except Exception as error:
        answer = (None, error)
    path.write_bytes(cloudpickle.dumps(answer))


def _be_program(
    program: Callable[[], object],
    words: Sequence[str],
    variables: Mapping[str, str],
    directory: str,
    out: _Descriptor,
    error: _Descriptor,
) -> None:
    """In the fork: becomes the program, and ends with its status."""
    os.setsid()
    os.chdir(directory)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for number, ours in enumerate((nowhere, out.number, error.number)):
        os.dup2(ours, number)
        os.close(ours)
    _begin(list(words), variables)
    sys.path.insert(0, directory)
    Rank.starter = _starter()
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = Rank  # type: ignore[misc]
    _end(program)


def _begin(words: list[str], variables: Mapping[str, str]) -> None:
    """What an interpreter does before it runs a program."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(variables)
    numpy.random.seed()
    multiprocessing.set_start_method(None, force=True)  # the usual one, and not that of this process
    sys.argv = words
    sys.modules["__main__"] = ModuleType("__main__")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, _stream(number))
        setattr(sys, f"__{name}__", getattr(sys, name))


def _stream(number: int) -> io.TextIOWrapper:
    if number == 0:
        return open(number, closefd=False)
    errors = "backslashreplace" if number == STDERR else "strict"
    return open(number, "w", errors=errors, buffering=1 if number == STDERR else -1, closefd=False)


def _end(run: Callable[[], object]) -> None:
    """Runs a program and leaves with its status, as an interpreter does."""
    status = 1
    try:
        run()
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    interpreter.join_threads()
    interpreter.run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


class Rank(subprocess.Popen[bytes]):
    """A rank of a program that is a fork itself."""

    starter: ClassVar[Connection]

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:
        variables, out, error = given[5], given[12], given[14]
        assert args[0] == sys.executable
        assert (out, error) == (-1, -1), "a rank writes where its launcher does"
        option = next(place for place, word in enumerate(args) if word in ("-c", "-m"))
        self.starter.send((list(args[option:]), variables, os.getcwd()))
        self.pid = self.starter.recv()
        self._child_created = True


def _starter() -> Connection:
    """Forks what starts ranks, which ends with this process; returns the connection to it."""
    launcher = os.getpid()
    _control(PR_SET_CHILD_SUBREAPER, 1)
    ours, theirs = Pipe()
    if os.fork():
        theirs.close()
        return ours
    ours.close()
    os.setsid()
    _control(PR_SET_PDEATHSIG, signal.SIGKILL)
    while True:
        try:
            words, variables, directory = theirs.recv()
        except EOFError:
            os._exit(0)
        if between := os.fork():
            os.waitpid(between, 0)
        elif os.fork():
            os._exit(0)
        else:
            _be_rank(words, variables, directory, launcher, theirs)


def _control(what: int, value: int) -> None:
    assert ctypes.CDLL(None).prctl(what, value, 0, 0, 0) == 0


def _be_rank(
    words: list[str], variables: Mapping[str, str], directory: str, launcher: int, told: Connection
) -> None:
    """In the fork: becomes the rank, and ends with its status."""
    while os.getppid() != launcher:
        time.sleep(0.001)
    os.setsid()
    os.chdir(directory)
    told.send(os.getpid())
    told.close()
    option, program, *arguments = words
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    if option == "-m":
        _begin(words, variables)
        _end(module)
    _begin([option, *arguments], variables)
    _end(partial(exec, program, vars(sys.modules["__main__"])))


_OURS = (command, module, script, call, _be_program, _starter, _be_rank, _end)
for _function in _OURS:  # no frames of the user's, as that of ``python -c`` is none
    _function.__code__ = _function.__code__.replace(co_filename="<string>")
