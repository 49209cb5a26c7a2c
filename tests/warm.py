"""Commands and programs carried out here, on ranks that are up already.

A command on two ranks is three programs that import PyTorch for ten seconds to train for one. How ranks are started,
watched and ended is what tests of the launcher are about, with whole commands; here is what a command says and does.
"""

from __future__ import annotations

import importlib
import io
import os
import runpy
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from evener.cli.main import main
from evener.distributed.environment import detect
from evener.distributed.failure import Failure, failure_of
from evener.distributed.launch.launch import Job
from evener.distributed.launch.process_count import Headcount
from tests.ranks import RankPool


def alone_in(directory: Path) -> Path:
    """Makes a directory whose parents hold nothing else.

    Each run of ``evener verify SCRIPT`` has links to all that is beside its directory and the two above: to thousands
    of directories in that of all tests.
    """
    path = directory / "home" / "projects" / "own"
    path.mkdir(parents=True)
    return path


@dataclass(frozen=True)
class Place:
    """Where a program is at home: its directory, where it looks for modules, and what tests tell it."""

    directory: str
    path: tuple[str, ...]
    variables: dict[str, str]

    @classmethod
    def of(cls, directory: str, path: list[str]) -> Place:
        told = {name: value for name, value in os.environ.items() if name.startswith("EVENER__TESTS_")}
        return cls(directory, tuple(path), told)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The modules of the directory are forgotten afterwards."""
        before, were = os.getcwd(), list(sys.path)
        os.chdir(self.directory)
        os.environ.update(self.variables)
        sys.path[:] = self.path
        importlib.invalidate_caches()
        try:
            yield
        finally:
            os.chdir(before)
            sys.path[:] = were
            for name in [name for name, module in sys.modules.items() if self._holds(module)]:
                del sys.modules[name]

    def _holds(self, module: object) -> bool:
        return (getattr(module, "__file__", None) or "").startswith(self.directory + os.sep)


def do(job: bytes, place: Place) -> tuple[bytes | Failure, str]:
    """On a rank: what the job returns, or how it fails as the rank of a launcher does, and what it said."""
    said = io.StringIO()
    with place.entered(), warnings.catch_warnings(), redirect_stderr(said):
        warnings.simplefilter("error", UserWarning)
        try:
            return cloudpickle.dumps(cloudpickle.loads(job).run()), said.getvalue()
        except Exception as error:
            return failure_of(error, detect().rank), said.getvalue()


class Warm:
    """A directory in which commands are carried out.

    Args:
        ranks: The ranks of a number, for what the commands launch.
    """

    def __init__(self, directory: Path, ranks: Callable[[int], RankPool], patch: pytest.MonkeyPatch) -> None:
        self._directory, self._ranks = str(directory), ranks
        patch.setattr("evener.distributed.launch.launch.run_job", self._launch)

    def carry_out(self, commands: str) -> str:
        """Each of ``evener ...`` and ``python FILE``, one a line, with success; returns what they print."""
        printed = io.StringIO()
        with redirect_stdout(printed), redirect_stderr(printed):
            for line in commands.replace("\\\n", " ").splitlines():
                assert self.status(*shlex.split(line, comments=True)) == 0, line + printed.getvalue()
        return printed.getvalue()

    def status(self, *words: str) -> int:
        """With which the command ends."""
        with Place(self._directory, (self._directory, *sys.path), {}).entered():
            match words:
                case ["evener", *arguments]:
                    return main(arguments)
                case ["python", file]:
                    runpy.run_path(file, run_name="__main__")
                case _:
                    assert not words, words
        return 0

    def _launch(
        self, job: Job, processes: Headcount, _: Any, run_dir: Path, path: list[str], *__: Any
    ) -> int:
        """In place of ``run_job``: the first failure goes on, as the launcher picks it."""
        answers = self._ranks(processes.start).run(
            do, cloudpickle.dumps(job), Place.of(self._directory, path)
        )
        for _, said in answers:
            sys.stderr.write(said)
        if failures := [found for found, _ in answers if isinstance(found, Failure)]:
            raise min(failures, key=lambda failure: failure.order).to_error()
        for rank, (result, _) in enumerate(answers):
            (run_dir / f"result-{rank}").write_bytes(result)
        return processes.start
