"""Writes surveys to JSON files, reads them, and validates every value.

A file may come from another machine or another version of Evener, or may be edited by hand. Errors name the place of
an invalid value, such as ``cards[1].memory_nbytes``.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import types
import typing
from typing import Any

from evener.errors import ConfigurationError
from evener.files import read_json, write_json
from evener.hardware.survey.facts import FORMAT, Survey


def save(survey: Survey, path: pathlib.Path) -> None:
    """Writes a survey to a file atomically."""
    write_json(path, as_json(survey), follow=True)


def load(path: pathlib.Path) -> Survey:
    """Reads a survey that :func:`save` wrote.

    Raises:
        ConfigurationError: If there is no such file, or it is not a valid survey. The message names the invalid value.
    """
    try:
        return from_json(read_json(path))
    except FileNotFoundError as error:
        raise ConfigurationError(f"there is no file {path}") from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is no survey: {error}; `evener devices --save FILE` writes one"
        ) from error


def as_json(survey: Survey) -> dict[str, Any]:
    return {"format": FORMAT, **dataclasses.asdict(survey)}


def from_json(value: Any) -> Survey:
    """Restores a survey from what :func:`as_json` returned.

    Raises:
        ValueError: If a value is invalid. The message names its place, and the expected type.
    """
    if not isinstance(value, dict) or "format" not in value:
        raise ValueError(f"it has no format, which would be {FORMAT!r}")
    if value["format"] != FORMAT:
        raise ValueError(f"its format is {value['format']!r}, and this version of Evener reads {FORMAT!r}")
    survey: Survey = _read({key: entry for key, entry in value.items() if key != "format"}, Survey, "")
    return survey


_WORDS: dict[Any, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
"""Names of JSON types, for messages."""


def _read(value: Any, kind: Any, place: str) -> Any:
    """Converts a JSON value to the type ``kind``, an annotation of the survey's dataclasses."""
    origin, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _read(value, parts[0], place)
    wanted = dict if dataclasses.is_dataclass(kind) else list if origin is tuple else origin
    # In Python a bool is an int, which is rejected here; an int is accepted as a float.
    right = isinstance(value, int | float if wanted is float else wanted)
    is_endless = isinstance(value, float) and not math.isfinite(value)
    if not right or is_endless or (isinstance(value, bool) and wanted is not bool):
        raise ValueError(f"{place or 'the whole'} is {value!r:.60}, not {_WORDS[wanted]}")
    if dataclasses.is_dataclass(kind):
        return _record(value, kind, place + "." * bool(place))
    if origin is tuple:
        return tuple(_read(entry, parts[0], f"{place}[{n}]") for n, entry in enumerate(value))
    if origin is dict:
        return {key: _read(entry, parts[1], f"{place}.{key}") for key, entry in value.items()}
    return origin(value)


def _record(value: dict[str, Any], kind: Any, place: str) -> Any:
    hints, missing = typing.get_type_hints(kind), dataclasses.MISSING
    for name in value.keys() - hints.keys():
        raise ValueError(f"nothing is called {place}{name}")
    for entry in dataclasses.fields(kind):
        if entry.name not in value and entry.default is missing and entry.default_factory is missing:
            raise ValueError(f"{place}{entry.name} is missing")
    return kind(**{name: _read(entry, hints[name], place + name) for name, entry in value.items()})
