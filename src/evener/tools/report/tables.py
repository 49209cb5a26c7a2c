"""Tables of a report, as texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evener.tools.report.numbers import value_text

_MOST_ROWS = 64
TEXT, WHOLE = "text", "whole"
"""Kinds of columns, beside the units of `evener.tools.report.numbers.value_text`."""

Column = tuple[str, str, Callable[[Any], Any]]
"""The heading, the kind or unit, and the function that returns the value of a row."""


@dataclass(frozen=True)
class Table:
    """A table of texts. ``align`` has a letter for each column: ``l`` for words, ``r`` for numbers."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str


def tabulated(title: str, items: Sequence[Any], columns: Sequence[Column]) -> Table:
    """Returns a table with a row for each item, for the first ones if they are many.

    Columns in which no item has a value are left out.
    """
    columns = [each for each in columns if any(each[2](item) not in (None, "") for item in items)]
    shown = items[:_MOST_ROWS]
    rows = tuple(tuple(_cell(kind, value(item)) for _, kind, value in columns) for item in shown)
    if len(shown) < len(items):
        title = f"{title} ({len(shown)} of {len(items):,})"
    align = "".join("l" if kind == TEXT else "r" for _, kind, _ in columns)
    return Table(title, tuple(name for name, _, _ in columns), rows, align)


def _cell(kind: str, value: Any) -> str:
    if value is None:
        return "–"
    if kind == TEXT:
        return str(value)
    return f"{value:,}" if kind == WHOLE else value_text(value, kind)
