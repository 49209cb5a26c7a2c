"""The kind of value that each setting takes, as its annotation says."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from evener.errors import ConfigurationError

EXPECTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a list of texts",
    str: "a text",
    Path: "a path that is not empty",
}
"""What a value of each kind is called in messages."""


def fit_kinds(settings: Any) -> None:
    """Checks that each value of a ``RunConfig`` is of a kind that its annotation names. Otherwise a text such as "no"
    counts as true.

    A text that is empty is refused, as from a variable of a shell that is not set: it would count as not given.
    Numbers of NumPy become Python's, a list may stand for a tuple, and a text for a path. A text in place of a list of
    texts becomes the list of this text, not of its letters.

    Raises:
        ConfigurationError: With the setting, the value, and what it must be.
    """
    own: Any = type(settings)
    for name, kinds in _kinds_of(own).items():
        value = getattr(settings, name)
        if not isinstance(value, int | float) and isinstance(value, Real):
            value = int(value) if isinstance(value, Integral) else float(value)
            object.__setattr__(settings, name, value)
        if isinstance(value, str) and tuple in _plain(kinds):
            object.__setattr__(settings, name, (value,))
        elif not any(_fits(value, kind) for kind in kinds):
            raise ConfigurationError(f"{name} is {value!r}; it must be {_expected(kinds)}")
        elif _plain(kinds).keys() <= {str, tuple} and _has_blank(value):
            raise ConfigurationError(f"{name} is empty: leave it out, or say what it is to be")


def _has_blank(value: object) -> bool:
    texts = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(text, str) and not text.strip() for text in texts)


@cache
def _kinds_of(settings: type) -> Mapping[str, tuple[Any, ...]]:
    """Returns the kinds that each field may have: types, and ``tuple[..., ...]``. A strategy may be an object of the
    user's, and has a check of its own."""
    hints = typing.get_type_hints(settings)
    found = {name: (hint,) if _is_one(hint) else typing.get_args(hint) for name, hint in hints.items()}
    return {name: kinds for name, kinds in found.items() if _plain(kinds).keys() <= EXPECTED.keys()}


def _is_one(hint: Any) -> bool:
    return isinstance(hint, type) or typing.get_origin(hint) is tuple


def _plain(kinds: tuple[Any, ...]) -> dict[Any, None]:
    return dict.fromkeys(typing.get_origin(kind) or kind for kind in kinds if kind is not type(None))


def _expected(kinds: tuple[Any, ...]) -> str:
    return " or ".join(EXPECTED[kind] for kind in _plain(kinds))


def _fits(value: object, kind: Any) -> bool:
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple | list) and all(
            isinstance(each, typing.get_args(kind)[0]) for each in value
        )
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if kind is int:  # its own check says more
        return value is not None
    return isinstance(value, str | Path) if kind is Path else isinstance(value, kind)
