"""Which task a run directory is of, so that a later command can build it again: ``task.json`` beside the settings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.errors import ConfigurationError, DataError
from evener.observer import Observer
from evener.records import RunStart, write_json
from evener.system import in_words
from evener.task import TaskLike

_FILE = "task.json"
CARRIED = ("batch_size", "dtype", "precision", "precision_of", "seed", "workers", "on_bad_sample")
"""Settings of a run by which its model computes and its samples are read; where it runs is decided anew."""


class OriginNote(Observer):
    """Writes down, at the start of a run, what its task is called and what its function was given."""

    def __init__(self, directory: Path, task: TaskLike, options: Mapping[str, Any]) -> None:
        self._directory, self._name, self._options = directory, name_of(task), dict(options)

    def start(self, run: RunStart) -> None:
        paths = [name for name, value in self._options.items() if isinstance(value, Path)]
        options = {
            name: str(value.absolute()) if name in paths else value for name, value in self._options.items()
        }
        known = {"task": self._name if _is_plain(options) else None, "options": options, "paths": paths}
        with in_words(f"no run can begin in {self._directory}"):
            write_json(self._directory / _FILE, known if known["task"] else {"task": None})


def name_of(task: TaskLike) -> str | None:
    """The name by which another process finds the task; None if it has none, as a function of a script."""
    if isinstance(task, str):
        return task
    module, name = getattr(task, "__module__", "__main__"), getattr(task, "__qualname__", "<none>")
    return None if module == "__main__" or "<" in name or not inspect.isfunction(task) else f"{module}:{name}"


def _is_plain(options: Mapping[str, Any]) -> bool:
    """Whether JSON gives them back as they are."""
    try:
        return bool(json.loads(json.dumps(options)) == options)
    except (TypeError, ValueError):
        return False


@dataclass(frozen=True)
class Origin:
    """What a run trained, as far as its directory says."""

    task: str | None
    options: dict[str, Any]
    settings: dict[str, Any]
    """Those of `CARRIED`."""


def origin(run: Path) -> Origin:
    """Of a run directory, or of one of its checkpoints.

    Raises:
        ConfigurationError: If it is no run directory.
        DataError: If its files cannot be read.
    """
    directory = next(
        (place for place in (run, *run.absolute().parents[:2]) if (place / "config.json").is_file()), None
    )
    if directory is None:
        raise ConfigurationError(
            f"{run} is no run directory: it has no config.json; name the directory that `evener train` has left"
        )
    settings, task = _read(directory / "config.json"), {}
    if (directory / _FILE).is_file():
        task = _read(directory / _FILE)
    options = task.get("options", {})
    options |= {name: Path(options[name]) for name in task.get("paths", ())}
    carried = {name: settings[name] for name in CARRIED if name in settings}
    carried = {name: tuple(value) if isinstance(value, list) else value for name, value in carried.items()}
    return Origin(task.get("task"), options, carried)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is no record of a run: it holds a {type(found).__name__}")
    return found
