"""Writes and reads ``report.json``, the versioned file that other programs read, too."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from evener.errors import DataError
from evener.files import dumps, read_json
from evener.tools.report.schema import FORMAT, VERSION, Report, ReportFile

_GREATEST = (1 << 63) - 1
"""The largest whole number, of bytes, steps or samples. Larger ones would not fit into a float."""


def json_of(file: ReportFile) -> str:
    """Returns the content of the file: strict JSON, the same bytes for the same report."""
    return dumps(dataclasses.asdict(file)) + "\n"


def read_report(path: Path) -> ReportFile:
    """Reads a file that `json_of` has made. Fields that are not known are ignored, as a later version may add some.

    Raises:
        DataError: If it is no such file, or one of another version.
    """
    try:
        found = read_json(path)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"it has no format {FORMAT!r}")
        if found.get("version") != VERSION:
            raise ValueError(
                f"it has version {found.get('version')!r} of the format, and version {VERSION} is known"
            )
        file: ReportFile = _value(ReportFile, found, "")
        for at, run in enumerate(file.runs):
            _check_columns(run, at)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no report that can be read: {error}") from error
    return file


def _check_columns(run: Report, at: int) -> None:
    """Raises ValueError if a series has not as many numbers as there are columns."""
    columns = len(run.columns.first)
    spread = [run.merges.spread] if run.merges and run.merges.spread else []
    lengths = [len(run.columns.last)]
    lengths += [len(each) for one in (*run.series, *spread) for each in (one.minimum, one.mean, one.maximum)]
    if any(length != columns for length in lengths):
        raise ValueError(f"runs[{at}] has series of other lengths than its {columns} columns")


def _value(kind: Any, value: Any, place: str) -> Any:
    """Converts a value of JSON to a type of the schema.

    Raises:
        ValueError: If it is of another type. The message names its place.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _value(arguments[0], value, place)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _record(kind, value, place)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(arguments[0], each, f"{place}[{at}]") for at, each in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {name: _value(arguments[1], each, f"{place}.{name}") for name, each in value.items()}
    if type(value) is int and abs(value) > _GREATEST:
        raise ValueError(f"{place.lstrip('.') or 'it'} is too large a number")
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise ValueError(f"{place.lstrip('.') or 'it'} is a {type(value).__name__}")


def _record(kind: Any, value: Mapping[str, Any], place: str) -> Any:
    fields = {}
    for name, (hint, needed) in _fields(kind).items():
        if name in value:
            fields[name] = _value(hint, value[name], f"{place}.{name}")
        elif needed:
            raise ValueError(f"{place.lstrip('.') or 'it'} has no {name}")
    return kind(**fields)


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Returns the type of each field of a dataclass, and whether it must be there."""
    hints, missing = typing.get_type_hints(kind), dataclasses.MISSING
    return {
        entry.name: (hints[entry.name], entry.default is missing and entry.default_factory is missing)
        for entry in dataclasses.fields(kind)
    }
