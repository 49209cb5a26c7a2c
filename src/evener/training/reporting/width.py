"""Lines for people, broken between words where a terminal is narrower than they are; files and pipes get them whole.

Characters that a terminal would obey are shown instead: names may be a stranger's.
"""

from __future__ import annotations

import os
import textwrap
from typing import Any

from evener.core.text import printable

INDENT = "  "
"""Before what goes on from the line above."""
NARROW = 20
"""Columns below which nothing is gained by breaking between words."""


def fitted(text: str, stream: Any) -> str:
    """``text`` for ``stream``, whose width is asked for anew each time: a window may be made smaller."""
    text, columns = printable(text), columns_of(stream)
    if columns is None or columns < NARROW:
        return text
    return "\n".join(_broken(line, columns) for line in text.split("\n"))


def columns_of(stream: Any) -> int | None:
    """Of the terminal that ``stream`` is; None if it is none, or does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None if stream.isatty() else None
    except (OSError, ValueError, AttributeError):
        return None


def _broken(line: str, columns: int) -> str:
    """A word longer than a line, as a path, is left whole, for whoever copies it."""
    if len(line) <= columns:
        return line
    before = line[: len(line) - len(line.lstrip())] + INDENT
    parts = textwrap.wrap(
        line, columns, subsequent_indent=before, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(parts)
