"""An unchanged torchrun script, on all ranks, with Evener's error and hang reports.

The script runs in the worker's interpreter as ``__main__``, just as ``python script.py`` runs it: its objects
can be pickled, its guard holds, its ``sys.argv`` and ``sys.path[0]`` are what they always are. It finds
torchrun's variables.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType

from evener.distributed.environment import detect
from evener.distributed.launch.launch import is_launched, resolve_processes, run_job
from evener.distributed.launch.rendezvous import Rendezvous
from evener.distributed.launch.scratch_dir import scratch
from evener.distributed.launch.worker import Job
from evener.distributed.session import RUN_DIR
from evener.distributed.watchdog.watchdog import TIMEOUT_SECONDS
from evener.errors import ConfigurationError
from evener.files import PACKAGE


class Observer(ABC):
    """Looks on while a script runs, on every rank, and tells at the end what was seen."""

    @abstractmethod
    def watching(self, rank: int, directory: Path) -> AbstractContextManager[None]:
        """Entered on the rank around the script; leaves what it has seen in ``directory``."""

    @abstractmethod
    def tell(self, directory: Path) -> None:
        """Called by the launcher when its ranks have ended, whether well or not."""


class Script(Job):
    """A file, or with ``is_module`` the dotted name of a module, and its command line."""

    works_on = True

    def __init__(
        self,
        name: str,
        args: Sequence[str],
        is_module: bool,
        timeout_seconds: float,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(timeout_seconds)
        self._name, self._args, self._is_module = name, list(args), is_module
        self._observer = observer

    def run(self) -> None:
        self.run_in(Path(os.environ[RUN_DIR]))

    def run_in(self, directory: Path) -> None:
        """Runs the script, and lets the observer leave what it sees in ``directory``."""
        rank = detect().rank
        with self._observer.watching(rank, directory) if self._observer else nullcontext():
            self._run()

    def _run(self) -> None:
        if self._is_module:
            sys.argv[:] = [self._name, *self._args]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(self._name, run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = [self._name, *self._args]
            sys.path.insert(0, str(Path(self._name).resolve().parent))
            run_file(self._name)


def run_script(
    script: str,
    args: Sequence[str] = (),
    *,
    is_module: bool = False,
    processes: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    rendezvous: Rendezvous | None = None,
    device: str | None = None,
    observer: Observer | None = None,
) -> None:
    """Runs a script that was written for torchrun on every rank; returns when all have ended with success.

    Where this process is a rank already (torchrun, SLURM), the script runs right here, with torchrun's variables.

    Args:
        script: A Python file, or with ``is_module`` a module's dotted name, as ``python -m`` takes it.
        args: Its command line.
        processes, timeout_seconds, rendezvous, device: As in `evener.distributed.launch.launch.launch`.
        observer: Looks on on all ranks, and tells about those that this process launched (else about its own).

    Raises:
        ConfigurationError: If there is no such script, or there cannot be so many processes.
        RankError: If a rank raised or died; ``exit_status`` is the script's own where it called ``sys.exit``.
        RankTimeoutError: If a rank waited in vain; says who is missing.
        InterruptedRunError: On SIGINT (Ctrl-C) or SIGTERM, after all ranks have ended.
    """
    _check_exists(script, is_module)
    job = Script(script, args, is_module, timeout_seconds, observer)
    with scratch() as directory:
        try:
            if is_launched():
                os.environ.update(detect().variables)
                job.run_in(directory)
            else:
                run_job(job, resolve_processes(processes, device), rendezvous, directory, _path_of_ranks())
        finally:
            if observer is not None:
                observer.tell(directory)


def _check_exists(script: str, is_module: bool) -> None:
    if is_module:
        try:
            found = importlib.util.find_spec(script) is not None
        except ImportError:
            found = False
        if not found:
            raise ConfigurationError(f"no module named {script!r} on the path; is its package installed?")
    elif not Path(script).is_file():
        raise ConfigurationError(f"no script {script!r} in {os.getcwd()}; give the path of a Python file")


def run_file(name: str) -> None:
    """Runs the file as a ``__main__`` that stays, so that what it left behind can still be found at exit."""
    module = ModuleType("__main__")
    module.__file__ = name
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    code = compile(Path(name).read_bytes(), name, "exec")
    exec(code, module.__dict__)


def _path_of_ranks() -> list[str]:
    """The path without what the launcher's own start put first, and with Evener in any case."""
    own = {"", os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0]))}
    path = sys.path[1:] if sys.path and sys.path[0] in own else list(sys.path)
    home = str(PACKAGE.resolve().parent)
    return path if home in path else [*path, home]
