"""The command ``evener train`` and its ranks as forks of a process that has imported PyTorch already.

A command on two ranks is three interpreters that import for nine seconds of processor time to train for one. What goes
wrong in a run, who notices, what is said and how all of them end does not depend on how a process came to its modules.
So the command here is a fork of the process whose forks the ranks of ``tests.ranks`` are, in a session of its own with
pipes of its own. Its ranks are what it starts by itself: children, with its bootstrap code, arguments and environment.
They do not hold what the launcher holds, for they are forks of a process that was there before the launcher ran::

    imports ── fork ──▶ command: runs ``evener``, and inherits orphans
                          └─ fork ──▶ starter ── fork ──▶ fork ──▶ rank, an orphan: a child of the command

How interpreters start is shown by the tests of the launcher, of scripts and of the command line.
"""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
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


class Command(subprocess.Popen[str]):
    """``evener`` with arguments, as :class:`subprocess.Popen` would start it with pipes for its output."""

    _process: BaseProcess

    def __init__(self, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        super().__init__(["evener", *arguments], stdout=pipe, stderr=pipe, text=True, env=variables)

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:
        variables, out, error = given[5], given[12], given[14]
        streams = (_Descriptor(out), _Descriptor(error))
        self._process = fork_of_imports(_be_command, args, dict(variables), os.getcwd(), *streams)
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
        """The process ids of the command's ranks; its first child is what starts them."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [int(pid) for pid in children[1:]]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode


def _be_command(
    words: Sequence[str], variables: Mapping[str, str], directory: str, out: _Descriptor, error: _Descriptor
) -> None:
    """In the fork: becomes the command, and ends with its status."""
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
    from evener.cli.main import command

    _end(command)


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
    """A rank of a command that is a fork itself."""

    starter: ClassVar[Connection]

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:
        variables, out, error = given[5], given[12], given[14]
        assert args[0] == sys.executable
        assert (out, error) == (-1, -1), "a rank writes where its launcher does"
        self.starter.send((args[args.index("-c") :], variables, os.getcwd()))
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
    option, bootstrap, *arguments = words
    _begin([option, *arguments], variables)
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    _end(partial(exec, bootstrap, vars(sys.modules["__main__"])))


for _function in (
    _be_command,
    _starter,
    _be_rank,
    _end,
):  # no frame of the user's, as what ``python -c`` runs is not
    _function.__code__ = _function.__code__.replace(co_filename="<string>")
