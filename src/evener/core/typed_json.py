"""Makes dataclasses of the values of a JSON file, whose types are checked: the file may be a stranger's.

Fields that are not known are ignored, as a later version may add some.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

_GREATEST = (1 << 63) - 1
"""The largest whole number, of bytes, steps or samples. Larger ones would not fit into a float."""


def value_of(kind: Any, value: Any, place: str = "") -> Any:
    """Converts a value of JSON to a type: a dataclass, a tuple, a dict, a number, text, or one of these or None.

    Raises:
        ValueError: If it is of another type. The message names its place.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return None if value is None else value_of(arguments[0], value, place)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _record(kind, value, place)
    if origin is tuple and isinstance(value, list):
        kinds = arguments if arguments[-1] is not Ellipsis else arguments[:1] * len(value)
        if len(kinds) != len(value):
            raise ValueError(f"{place.lstrip('.') or 'it'} has {len(value)} entries")
        entries = enumerate(zip(kinds, value, strict=True))
        return tuple(value_of(each, entry, f"{place}[{at}]") for at, (each, entry) in entries)
    if origin is dict and isinstance(value, dict):
        return {name: value_of(arguments[1], each, f"{place}.{name}") for name, each in value.items()}
    if type(value) is int and abs(value) > _GREATEST:
        raise ValueError(f"{place.lstrip('.') or 'it'} is too large a number")
    if kind is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise ValueError(f"{place.lstrip('.') or 'it'} is not finite")
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise ValueError(f"{place.lstrip('.') or 'it'} is a {type(value).__name__}")


def _record(kind: Any, value: Mapping[str, Any], place: str) -> Any:
    fields = {}
    for name, (hint, needed) in _fields(kind).items():
        if name in value:
            fields[name] = value_of(hint, value[name], f"{place}.{name}")
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
