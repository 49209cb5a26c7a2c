"""A field of ``RunConfig`` with its help text, from which the command line is made."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Any

from evener.core.elsewhere import shown


def option(
    default: Any,
    help: str,
    *,
    metavar: str | None = None,
    choices: tuple[str, ...] = (),
    without_value: str | None = None,
) -> Any:
    """Returns a data class field with metadata for the command line.

    ``without_value`` is the value of an option that is given without a value.
    """
    known = {"help": help, "metavar": metavar, "choices": choices, "without_value": without_value}
    return field(default=default, metadata=known)


def as_json(value: Any) -> Any:
    """Returns the value of a setting in a type that JSON can hold; a strategy by its words."""
    if isinstance(value, tuple):
        return [as_json(item) for item in value]
    if isinstance(value, Path):
        return shown(value)
    if isinstance(value, float):
        # Without the type of a default limit, or of NumPy: a checkpoint holds plain numbers alone.
        return float(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)
