"""A survey as a file of JSON, and back, with every value looked at.

The file comes from another machine, perhaps by hand and from another version of Evener: what does not fit is named by
its place, as ``cards[1].memory_nbytes``.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import types
import typing
from typing import Any

from evener.errors import ConfigurationError
from evener.files import write_json
from evener.hardware.survey.facts import FORMAT, Survey


def save(survey: Survey, path: pathlib.Path) -> None:
    """Writes the file whole or not at all."""
    write_json(path, as_json(survey))


def load(path: pathlib.Path) -> Survey:
    """What :func:`save` wrote.

    Raises:
        ConfigurationError: If it is no survey; says what of it is not.
    """
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigurationError(f"there is no file {path}") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigurationError(f"{path} is no survey: it cannot be read as JSON: {error}") from error
    try:
        return from_json(value)
    except ValueError as error:
        raise ConfigurationError(
            f"{path} is no survey: {error}; `evener devices --save FILE` writes one"
        ) from error


def as_json(survey: Survey) -> dict[str, Any]:
    return {"format": FORMAT, **dataclasses.asdict(survey)}


def from_json(value: Any) -> Survey:
    """The survey that :func:`as_json` made this of.

    Raises:
        ValueError: Names the place of what does not fit, and what belongs there.
    """
    if not isinstance(value, dict) or "format" not in value:
        raise ValueError(f"it has no format, which would be {FORMAT!r}")
    if value["format"] != FORMAT:
        raise ValueError(f"its format is {value['format']!r}, and this version of Evener reads {FORMAT!r}")
    survey = _read({key: entry for key, entry in value.items() if key != "format"}, Survey, "")
    assert isinstance(survey, Survey)
    count = len(survey.cards)
    for number, path in enumerate(survey.paths):
        if not (0 <= path.a < count and 0 <= path.b < count and path.a != path.b):
            raise ValueError(
                f"paths[{number}] joins cards {path.a} and {path.b}, and there are {count} cards"
            )
    return survey


def _read(value: Any, kind: Any, place: str) -> Any:
    """``value`` as one of ``kind``, an annotation of the classes above."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _record(value, kind, place)
    if origin is types.UnionType:
        return None if value is None else _read(value, parts[0], place)
    if origin is tuple:
        _expect(value, list, "a list", place)
        return tuple(_read(entry, parts[0], f"{place}[{n}]") for n, entry in enumerate(value))
    if origin is dict:
        _expect(value, dict, "an object", place)
        return {key: _read(entry, parts[1], f"{place}.{key}") for key, entry in value.items()}
    return _scalar(value, kind, place)


def _record(value: Any, kind: Any, place: str) -> Any:
    _expect(value, dict, "an object", place)
    hints, fields = typing.get_type_hints(kind), {entry.name: entry for entry in dataclasses.fields(kind)}
    for name in value:
        if name not in fields:
            raise ValueError(f"nothing is called {_at(place, name)}")
    for name, entry in fields.items():
        missing = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        if missing and name not in value:
            raise ValueError(f"{_at(place, name)} is missing")
    return kind(**{name: _read(entry, hints[name], _at(place, name)) for name, entry in value.items()})


_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def _scalar(value: Any, kind: type, place: str) -> Any:
    """A bool is an int to Python, and none here; a whole number is a float."""
    right = isinstance(value, int | float if kind is float else kind)
    if not right or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{place} is {value!r}, not {_WORDS[kind]}")
    return kind(value)


def _expect(value: Any, kind: type, words: str, place: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{place or 'the whole'} is {value!r:.60}, not {words}")


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
