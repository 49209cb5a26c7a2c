"""Breaks lines between words to fit a terminal. Files and pipes get them whole.

Control characters are shown instead of sent to the terminal, because names may come from a stranger.
"""

from __future__ import annotations

import os
import textwrap
from typing import Any

from evener.core.text import printable

INDENT = "  "
"""Indentation of continuation lines."""
NARROW = 20
"""Columns below which lines are not broken."""


def fitted(text: str, stream: Any) -> str:
    """Fits ``text`` to the width of ``stream``, which is read each time: a window may be resized."""
    text, columns = printable(text), columns_of(stream)
    if columns is None or columns < NARROW:
        return text
    return "\n".join(_broken(line, columns) for line in text.split("\n"))


def columns_of(stream: Any) -> int | None:
    """Returns the columns of the terminal ``stream``, or None if it is no terminal or its width is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None if stream.isatty() else None
    except (OSError, ValueError, AttributeError):
        return None


def _broken(line: str, columns: int) -> str:
    """Breaks a line. A word longer than a line, such as a path, stays whole, so that it can be copied."""
    if len(line) <= columns:
        return line
    before = line[: len(line) - len(line.lstrip())] + INDENT
    parts = textwrap.wrap(
        line, columns, subsequent_indent=before, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(parts)
