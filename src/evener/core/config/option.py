"""A field of ``RunConfig`` with its help text, from which the command line is made."""

from __future__ import annotations

from dataclasses import field
from typing import Any


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
