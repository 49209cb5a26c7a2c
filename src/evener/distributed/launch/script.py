"""Runs an unchanged torchrun script on all ranks, with Evener's error and hang reports.

The script runs in the rank's interpreter as ``__main__``, as with ``python script.py``: its objects can be pickled, its
``__main__`` guard is true, and ``sys.argv`` and ``sys.path[0]`` are as usual. torchrun's environment variables are set.
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

from evener.core.config.time_limit import TIMEOUT_SECONDS
from evener.distributed.environment import detect
from evener.distributed.launch.launch import is_launched, resolve_processes, run_job
from evener.distributed.launch.rendezvous import Rendezvous
from evener.distributed.launch.scratch_dir import scratch
from evener.distributed.launch.worker import Job
from evener.distributed.session import RUN_DIR
from evener.errors import ConfigurationError
from evener.files import PACKAGE
from evener.torch_internals.ddp import groups_freed_last


class ScriptHook(ABC):
    """Observes a script on every rank, and reports at the end."""

    @abstractmethod
    def watching(self, rank: int, directory: Path) -> AbstractContextManager[None]:
        """Returns the context in which the script runs on ``rank``. It writes its observations to ``directory``."""

    @abstractmethod
    def following(self, directory: Path) -> AbstractContextManager[None]:
        """Returns the context in which the launcher runs its ranks. At its end, also after an error, it reports the
        observations in ``directory``."""


class Script(Job):
    """Job that runs a Python file, or with ``is_module`` a module, with command line arguments."""

    works_on = True

    def __init__(
        self,
        name: str,
        args: Sequence[str],
        is_module: bool,
        timeout_seconds: float,
        observer: ScriptHook | None = None,
    ) -> None:
        super().__init__(timeout_seconds)
        self._name, self._args, self._is_module = name, list(args), is_module
        self._observer = observer

    def run(self) -> None:
        self.run_in(Path(os.environ[RUN_DIR]))

    def run_in(self, directory: Path) -> None:
        """Runs the script. The observer, if any, writes to ``directory``."""
        rank = detect().rank
        with (
            groups_freed_last(),
            self._observer.watching(rank, directory) if self._observer else nullcontext(),
        ):
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
    observer: ScriptHook | None = None,
) -> None:
    """Runs a torchrun script on every rank, and returns when all ranks have succeeded.

    If this process is already a rank (torchrun, SLURM), the script runs in this process, with torchrun's variables.

    Args:
        script: A Python file, or with ``is_module`` a module's dotted name, as for ``python -m``.
        args: Command line arguments of the script.
        is_module: True if ``script`` names a module.
        processes, timeout_seconds, rendezvous, device: As in `evener.distributed.launch.launch.launch`.
        observer: Observes all ranks, and reports on those that this process launched, or else on its own rank.

    Raises:
        ConfigurationError: If the script does not exist, or this machine cannot run so many processes.
        RankError: If a rank raised or died. If it called ``sys.exit``, the error's ``exit_status`` is the script's.
        RankTimeoutError: If a rank waited in vain. The message says which rank is missing.
        InterruptedRunError: On SIGINT (Ctrl-C) or SIGTERM, after all ranks have ended.
    """
    file_of_script(script, is_module)
    job = Script(script, args, is_module, timeout_seconds, observer)
    with scratch() as directory, observer.following(directory) if observer else nullcontext():
        if is_launched():
            os.environ.update(detect().variables)
            job.run_in(directory)
        else:
            run_job(job, resolve_processes(processes, device), rendezvous, directory, _path_of_ranks())


def file_of_script(script: str, is_module: bool) -> Path:
    """Returns the file of a script or, with ``is_module``, of a module, which may be that of a package.

    Raises:
        ConfigurationError: If there is none.
    """
    if not is_module:
        if not Path(script).is_file():
            raise ConfigurationError(f"no script {script!r} in {os.getcwd()}; give the path of a Python file")
        return Path(script)
    try:
        found = importlib.util.find_spec(script)
    except ImportError:
        found = None
    if found is None:
        raise ConfigurationError(f"no module named {script!r} on the path; is its package installed?")
    return Path(found.origin or "")


def run_file(name: str) -> None:
    """Runs the file as ``__main__``. The module stays in ``sys.modules``, so that its objects are available at exit."""
    module = ModuleType("__main__")
    module.__file__ = name
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    code = compile(Path(name).read_bytes(), name, "exec")
    exec(code, module.__dict__)


def _path_of_ranks() -> list[str]:
    """Returns ``sys.path`` without the launcher's own first entry, and with Evener's directory in any case."""
    own = {"", os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0]))}
    path = sys.path[1:] if sys.path and sys.path[0] in own else list(sys.path)
    home = str(PACKAGE.resolve().parent)
    return path if home in path else [*path, home]
