"""Writes and reads ``task.json``, which names the task of a run directory so that a later command can build it again.

A run directory may come from a stranger, and a name in it may be that of any function: importing and calling it would
run the stranger's choice of code. So a command builds a task that comes with Evener or an installed package without
asking. It builds any other task only if its user has named it too, or has said that the directory is trusted.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.checkpoint.remote.fetch import fetched
from evener.core.config.run_config import RunConfig
from evener.core.elsewhere import shown
from evener.core.observer import Observer
from evener.core.os_errors import storage_errors
from evener.core.plugins import installed
from evener.core.records import RunStart
from evener.core.task.task import TaskLike
from evener.errors import ConfigurationError, DataError
from evener.files import read_json, write_json
from evener.training.builtin_tasks import BUILT_IN

_FILE = "task.json"
CARRIED = ("batch_size", "dtype", "precision", "precision_of", "seed", "workers", "on_bad_sample")
"""Settings of a run that decide how its model computes and its samples are read. Where it runs is decided anew, so that
there are never more workers than cores.
"""


class OriginNote(Observer):
    """Writes down, at the start of a run, the name of its task and the arguments of its function."""

    def __init__(self, directory: Path, task: TaskLike, options: Mapping[str, Any]) -> None:
        self._directory, self._name, self._options = directory, name_of(task), dict(options)

    def start(self, run: RunStart) -> None:
        paths = [name for name, value in self._options.items() if isinstance(value, Path)]
        options = {
            name: str(value.absolute()) if name in paths else value for name, value in self._options.items()
        }
        known = {"task": self._name if _is_plain(options) else None, "options": options, "paths": paths}
        with storage_errors(f"no run can begin in {self._directory}"):
            write_json(self._directory / _FILE, known if known["task"] else {"task": None})


def name_of(task: TaskLike) -> str | None:
    """Returns the name by which another process can import the task, or None if it has none, as in a script."""
    if isinstance(task, str):
        return task
    module, name = getattr(task, "__module__", "__main__"), getattr(task, "__qualname__", "<none>")
    return None if module == "__main__" or "<" in name or not inspect.isfunction(task) else f"{module}:{name}"


def _is_plain(options: Mapping[str, Any]) -> bool:
    """Returns True if JSON reproduces the options exactly."""
    try:
        return bool(json.loads(json.dumps(options)) == options)
    except (TypeError, ValueError):
        return False


@dataclass(frozen=True)
class Origin:
    """The task and settings of a run, as far as its directory tells."""

    task: str | None
    options: dict[str, Any]
    settings: dict[str, Any]
    """The settings named in `CARRIED`."""

    def chosen(self, run: Path, named: TaskLike | None, trust: bool) -> tuple[TaskLike, dict[str, Any]]:
        """Returns the task to build, and the arguments of its function.

        Args:
            run: Name of the run for error messages.
            named: The task that the user has named. The run's arguments are used only if it is the run's own task.
            trust: Whether to build the run's own task whatever it is.

        Raises:
            ConfigurationError: If neither the user nor the run names a task, or only the run does and it is not
                trusted.
        """
        if named is not None:
            return named, self.options if named == self.task else {}
        if self.task is None:
            raise ConfigurationError(
                f"{shown(run)} does not say which task it is of, which was none that has a name: give --task "
                "package.module:function"
            )
        if not trust and not is_known(self.task):
            raise ConfigurationError(
                f"{shown(run)} says that its task is {self.task!r}, a function which is not Evener's and would be run "
                f"as it is: name it yourself with --task {self.task}, or give --trust where the directory is your own"
            )
        return self.task, self.options


def is_known(task: str) -> bool:
    """Returns True if a task comes with Evener, or with an installed package that declares it."""
    return task in BUILT_IN or task in BUILT_IN.values() or task in installed("task")


def origin(run: Path) -> Origin:
    """Returns the origin of a run directory, or of the run of a checkpoint in it.

    Raises:
        ConfigurationError: If it is no run directory.
        DataError: If its files cannot be read.
    """
    fetched(run)
    directory = next(
        (place for place in (run, *run.absolute().parents[:2]) if (place / "config.json").is_file()), None
    )
    if directory is None:
        raise ConfigurationError(
            f"{run} is no run directory: it has no config.json; name the directory that `evener train` has left"
        )
    settings, task = read_object(directory / "config.json"), {}
    if (directory / _FILE).is_file():
        task = read_object(directory / _FILE)
    return Origin(*_task(directory / _FILE, task), _carried(directory / "config.json", settings))


def _task(path: Path, found: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Returns the task's name and arguments, after checking the types."""
    name, options, paths = found.get("task"), found.get("options", {}), found.get("paths", [])
    texts = (
        isinstance(options, dict) and isinstance(paths, list) and all(isinstance(each, str) for each in paths)
    )
    if (
        not isinstance(name, str | None)
        or not texts
        or not all(isinstance(options.get(each), str) and "\0" not in options[each] for each in paths)
    ):
        raise DataError(f"{path} does not say which task the run is of, as Evener writes it")
    return name, options | {each: Path(options[each]) for each in paths}


def _carried(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings named in `CARRIED`, after checking them."""
    found = {name: settings[name] for name in CARRIED if name in settings}
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    try:
        workers = RunConfig(**found).workers
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path} does not hold the settings of a run: {error}") from error
    if "workers" in found:
        found["workers"] = min(workers, os.cpu_count() or 1)
    return found


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file of a run.

    Raises:
        DataError: If it cannot be read, or holds no names with values.
    """
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is no file of a run: it holds a {type(found).__name__}")
    return found
