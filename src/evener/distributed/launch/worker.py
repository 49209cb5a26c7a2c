"""Main program of a launched rank: loads the job, runs it, writes a result or a failure, and ends.

A rank ends with ``os._exit`` after the steps of a normal Python exit (join threads, run ``atexit`` functions, flush
output). Only the destruction of C++ objects, in undefined order, is skipped: there gloo sometimes aborts a rank that
has done all its work.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import cloudpickle

from evener.core.os_errors import storage_errors
from evener.core.stacks import record_crash
from evener.core.stdio import guard, shorten_own_warnings
from evener.distributed.environment import detect
from evener.distributed.failure import is_communication_error, record_failure
from evener.distributed.file_descriptors import reserve
from evener.distributed.launch.scratch_dir import UNWRITTEN
from evener.distributed.session import agent_watchdog
from evener.distributed.signals import GRACE_SECONDS, die_with, enforce, interruption, raising, stop_signals
from evener.distributed.watchdog.store_health import LAUNCHER_PID
from evener.distributed.watchdog.watchdog import current_watchdog
from evener.errors import InterruptedRunError, RankError
from evener.torch_internals import interpreter

BOOTSTRAP = (
    "import sys; '' in sys.path and sys.path.remove(''); "
    "import gc, json, os, signal; gc.disable(); os.path.isdir(sys.argv[1]) or sys.exit(1); "
    "plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler; "
    "plain and signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "file = open(sys.argv[1] + '/path.json'); path = json.load(file); file.close(); here = '', os.getcwd(); "
    "sys.path[:] = sorted(path, key=here.__contains__); "
    "from evener.distributed.launch.worker import main; sys.path[:] = path; "
    "plain and signal.signal(signal.SIGINT, signal.default_int_handler); main(sys.argv[1])"
)
"""The code that a rank's interpreter runs. It uses the launcher's ``sys.path``, also to find Evener itself. Until that
is imported, the working directory comes last: a user's ``random.py`` or ``types.py`` there would take the place of
Python's own, as it does not in the launcher. Ctrl-C during the imports ends it without a traceback, and so does the end
of a launcher that was stopped while it started ranks. Nothing is collected before the rank has its job: see
:mod:`evener.core.collector`."""


class Job(ABC):
    """What a launched rank runs. It is sent to the rank with cloudpickle."""

    works_on = False
    """True if threads that still run after `run` may be part of the job's work."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds

    @abstractmethod
    def run(self) -> Any:
        """Runs the job, and returns the rank's result."""

    def signals(self) -> AbstractContextManager[None]:
        """Returns the context in which the job runs and which handles stop signals. By default it does nothing."""
        return nullcontext()


class RankCall(Job):
    """Job that calls a function with arguments. A stop signal raises `InterruptedRunError` in the function."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_seconds: float,
    ) -> None:
        super().__init__(timeout_seconds)
        self.function, self._args, self._kwargs = function, args, kwargs

    def run(self) -> Any:
        return self.function(*self._args, **self._kwargs)

    def signals(self) -> AbstractContextManager[None]:
        return raising(stop_signals(), progress)


def progress() -> str:
    """Returns the position of the run in this process, as set with `Watchdog.progress`; empty if it was not set."""
    watchdog = current_watchdog()
    return "" if watchdog is None else watchdog.progress_text


_LONGEST = 107 - len("/pymp-12345678/listener-12345678")


def main(run_dir: str) -> None:
    """Runs the job in ``run_dir`` as the rank given by the environment variables, and ends the process."""
    die_with(int(os.environ[LAUNCHER_PID]))
    reserve()
    shorten_own_warnings()
    _hold_files_of_workers(run_dir)
    environment = detect()
    record_crash(Path(run_dir) / f"crash-{environment.rank}")
    enforce(_record_interruption)
    (Path(run_dir) / f"result-{environment.local_rank}").unlink(missing_ok=True)  # of an earlier start
    status, works_on, process = 1, False, os.getpid()
    try:
        job = job_in(Path(run_dir))
        gc.freeze()  # what was imported: a later collection, also in the middle of a step, has little to go through
        gc.enable()
        agent_watchdog(environment, job.timeout_seconds)
        if isinstance(job, RankCall):  # a user's script gets Python's own behavior
            guard()
        with job.signals():
            result = job.run()
        if os.getpid() == process:
            _write_result(Path(run_dir) / f"result-{detect().local_rank}", result)
        status, works_on = 0, job.works_on
    except BaseException as error:
        rank = detect().rank  # it may have changed
        if not isinstance(error, SystemExit):
            sys.last_value = error  # as Python does, for functions that it calls at exit
        status = _status_of(error, rank) if os.getpid() == process else _status_of_child(error)
    _leave(status, works_on, is_rank=os.getpid() == process)


def _hold_files_of_workers(run_dir: str) -> None:
    """Lets the processes that this rank starts, such as a DataLoader's workers, have the sockets of `multiprocessing`
    in ``run_dir``, which the launcher removes. In directories of their own they stay if a worker is killed. The path of
    a socket has at most 107 bytes: where ``run_dir`` is long, they have directories of their own."""
    if len(os.fsencode(run_dir)) > _LONGEST:
        return
    before, tempfile.tempdir = tempfile.tempdir, run_dir
    try:
        get_temp_dir()
    finally:
        tempfile.tempdir = before


def job_in(run_dir: Path) -> Job:
    """Loads the job that the launcher wrote. Each call returns a new object."""
    job: Job = cloudpickle.loads((run_dir / "job").read_bytes())
    return job


def result_of(run_dir: Path, local_rank: int) -> Any:
    """Loads the result of the rank's job.

    Raises:
        RankError: If the rank ended with status 0 before the job returned.
    """
    path = run_dir / f"result-{local_rank}"
    if not path.exists():
        raise RankError(
            f"local rank {local_rank} ended with status 0 before its function returned: something in it calls "
            "sys.exit or os._exit"
        )
    return cloudpickle.loads(path.read_bytes())


def _status_of(error: BaseException, rank: int) -> int:
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return 0
    watchdog = current_watchdog()
    if watchdog is not None and is_communication_error(error):
        with suppress(Exception):
            error = watchdog.explain(error).with_traceback(error.__traceback__)
    return record_failure(error, rank).exit_status


def _status_of_child(error: BaseException) -> int:
    """Shows the error of a process that the job has forked, as Python does. It is not the rank, and ends for itself."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    if isinstance(error.code, int | None):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _record_interruption(number: int) -> None:
    record_failure(InterruptedRunError(interruption(number, progress()), number), detect().rank)


def _write_result(path: Path, result: Any) -> None:
    try:
        sent = cloudpickle.dumps(result)
    except Exception as error:
        raise RankError(
            f"the result of a rank, a {type(result).__name__}, cannot be sent back: {error}; "
            "return what can be pickled"
        ) from error
    with storage_errors(UNWRITTEN):
        path.write_bytes(sent)


def _leave(status: int, works_on: bool, is_rank: bool) -> None:
    """Ends the process like a normal Python exit, except that C++ objects are not destroyed.

    After a failure the exit takes at most `GRACE_SECONDS`, even if threads or ``atexit`` functions do not end.
    """
    if status != 0:
        timer = threading.Timer(GRACE_SECONDS, os._exit, (status,))
        timer.daemon = True
        timer.start()
    watchdog = current_watchdog()
    if watchdog is not None and is_rank:
        watchdog.close(status, works_on)
    with suppress(BaseException):
        interpreter.join_threads()
    with suppress(BaseException):
        interpreter.run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status)
