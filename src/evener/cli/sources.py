"""Reads settings that the command line does not give from environment variables and a TOML file.

::

    command line  >  EVENER_BATCH_SIZE=32  >  batch_size = 32 in --config run.toml  >  defaults

All settings have their Python names; ``task``, ``data_dir`` and torchrun's options can be set in the same way, and
arguments of the task's function in a table ``[option]``. One file may serve several commands: each uses the settings
for which it has an option. A name that no command knows, or a value of the wrong type, is an error that names its
source.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evener.cli.options import FURTHER, KINDS, config_of, task_options_of
from evener.core.config.kinds import EXPECTED
from evener.core.config.run_config import RunConfig
from evener.core.elsewhere import place_of, shown
from evener.core.os_errors import os_error_message
from evener.errors import ConfigurationError
from evener.files import read_named

PREFIX = "EVENER_"
OWN = "EVENER__"
"""Prefix of variables that Evener sets for its own processes. They are not settings."""
OPTIONS = "option"
"""Name of the table that holds arguments of the task's function."""
_TRUTH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_FIELDS = {entry.name: entry for entry in dataclasses.fields(RunConfig)}
_KINDS: dict[str, Any] = {**KINDS, **FURTHER}
_HINTS: dict[str, Any] = typing.get_type_hints(RunConfig)


def complete(arguments: argparse.Namespace, variables: Mapping[str, str] | None = None) -> None:
    """Adds settings that the command line did not give, and records the source of each in ``arguments.sources``.

    Args:
        variables: The environment variables; None for those of the process.

    Raises:
        ConfigurationError: If the file cannot be read, a name is unknown, or a value has the wrong type.
    """
    if not hasattr(arguments, "config"):
        return
    arguments.sources, arguments.options_below = {}, {}
    for values, source in (
        _of_variables(os.environ if variables is None else variables),
        _of_file(arguments.config),
    ):
        arguments.options_below |= values.pop(OPTIONS, {})
        for name, value in values.items():
            if getattr(arguments, name, False) is None:
                setattr(arguments, name, value)
                arguments.sources[name] = source(name)


Found = tuple[dict[str, Any], Callable[[str], str]]
"""Values by name, and a function that returns the source of a value for messages."""


def _of_variables(variables: Mapping[str, str]) -> Found:
    found = {
        name.removeprefix(PREFIX).lower(): text
        for name, text in variables.items()
        if name.startswith(PREFIX) and not name.startswith(OWN)
    }
    _check_names(found, _KINDS, _variable)
    return {name: _from_text(name, text) for name, text in found.items()}, _variable


def _variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"


def _of_file(path: Path | None) -> Found:
    def source(name: str) -> str:
        return str(path)

    if path is None:
        return {}, source
    found = _read(path)
    _check_names(found, [*_KINDS, OPTIONS], lambda name: f"{path}: {name}")
    if not isinstance(options := found.pop(OPTIONS, {}), dict):
        raise ConfigurationError(
            f"{path}: {OPTIONS} = {options!r}: it must be a table [{OPTIONS}] of arguments"
        )
    for key in options:
        if not key.isidentifier():
            raise ConfigurationError(f"{path}: [{OPTIONS}] {key!r} is no name of an argument")
    values = {name: _from_toml(name, value, f"{path}: {name} = {value!r}") for name, value in found.items()}
    return {**values, OPTIONS: options}, source


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(read_named(path))
    except OSError as error:
        raise ConfigurationError(f"the settings cannot be read: {os_error_message(error)}") from error
    except ValueError as error:  # invalid TOML or UTF-8
        raise ConfigurationError(f"{path} is no TOML: {error}") from error


def _check_names(found: Mapping[str, Any], known: Any, said: Callable[[str], str]) -> None:
    from evener.core.did_you_mean import nearest

    for name in found:
        if name not in known:
            near = nearest(name.replace("-", "_"), known)
            ways = f"did you mean {said(near)}?" if near else f"settings are {', '.join(known)}"
            raise ConfigurationError(f"{said(name)} is no setting; {ways}")


def _from_text(name: str, text: str) -> Any:
    """Converts the text of an environment variable. Lists are split into words as by a shell."""
    kind, said = _KINDS[name], f"{_variable(name)} = {text!r}"
    try:
        if kind is bool:
            return _TRUTH[text.lower()]
        if kind is tuple:
            return tuple(shlex.split(text))
        value = _path(name, text) if kind is Path else kind(text)
    except (ValueError, KeyError):
        raise _wrong(said, kind) from None
    return _chosen(name, value, said)


def _from_toml(name: str, value: Any, said: str) -> Any:
    kind, given = _KINDS[name], type(value)
    without = _FIELDS[name].metadata["without_value"] if name in _FIELDS else None
    if without and value is True:
        return without
    if kind is tuple and given is list and all(isinstance(each, str) for each in value):
        return tuple(value)
    if kind is Path and given is str and value:
        return place_of(name, value)
    fits = given is kind or (kind is float and given is int)
    if not fits and not (given is int and int in typing.get_args(_HINTS.get(name))):
        raise _wrong(said, kind)
    return _chosen(name, kind(value) if kind is float else value, said)


def _path(name: str, text: str) -> Path:
    if not text:
        raise ValueError(text)
    return place_of(name, text)


def _chosen(name: str, value: Any, said: str) -> Any:
    choices = _FIELDS[name].metadata["choices"] if name in _FIELDS else ()
    if choices and value not in choices:
        raise ConfigurationError(f"{said}: it must be one of {', '.join(choices)}")
    return value


def _wrong(said: str, kind: type) -> ConfigurationError:
    return ConfigurationError(f"{said}: it must be {EXPECTED[kind]}")


# Output


def as_toml(arguments: argparse.Namespace) -> str:
    """Returns all settings for which the command has an option, as a TOML file for ``--config``.

    Raises:
        ConfigurationError: If settings are invalid, or an argument cannot be written as TOML.
    """
    config, sources = config_of(arguments), arguments.sources
    lines = []
    for name in dict.fromkeys(("task", "data_dir", *_FIELDS, *FURTHER)):
        if not hasattr(arguments, name):
            continue
        value = getattr(config, name) if name in _FIELDS else getattr(arguments, name)
        place = sources.get(name) or ("" if getattr(arguments, name) is None else "the command line")
        if value is not None:
            lines.append(f"{name} = {_toml(name, value)}" + (f"  # {place}" if place else ""))
    options = task_options_of(arguments, data_dir=False) if hasattr(arguments, "option") else {}
    if options:
        lines += ["", f"[{OPTIONS}]", *(f"{key} = {_toml(key, value)}" for key, value in options.items())]
    return "\n".join(lines)


def _toml(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return json.dumps(value if isinstance(value, str) else shown(value), ensure_ascii=False).replace(
            "\x7f", "\\u007f"
        )
    if isinstance(value, list) or (isinstance(value, tuple) and name in _FIELDS):
        return f"[{', '.join(_toml(name, each) for each in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_toml(name, str(key))} = {_toml(name, each)}' for key, each in value.items())}}}"
    raise ConfigurationError(f"{name} is {value!r}, for which TOML has no word: leave it to the command line")
