"""Texts of bounded size without hidden orders: what an exception says, lists of names, and names that strangers chose.

An exception may carry a tensor of a million numbers in its text, and its ``__str__`` may itself raise. Neither may keep
a person from reading what went wrong, nor fill a terminal. The name of a file, a metric or a weight may hold characters
that a terminal obeys instead of showing them.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from types import TracebackType

_LONGEST = 4000
"""Characters of a text that is shown."""
_LONGEST_TRACE = 20_000
_TAIL = 4
"""The part of them that is the end of the text is one in so many."""


_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, ESC among them, but for the tab and the end of a line
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"  # unseen ones, and those that turn letters around
    "\ud800-\udfff\ufffe\uffff]"  # halves of characters and what is none, which neither UTF-8 nor XML takes
)


def printable(text: str) -> str:
    """The text for a terminal or a drawing, with each character that would be obeyed rather than shown as ``\\x1b``."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str, longest: int = _LONGEST) -> str:
    """The text, or where it is longer its beginning and its end, and how long it is."""
    if len(text) <= longest:
        return text
    tail = longest // _TAIL
    return f"{text[: longest - tail]} ... ({len(text):,} characters in all) ... {text[-tail:]}"


def said(error: BaseException) -> str:
    """``str(error)``, shortened; in words if it cannot be made."""
    try:
        text = str(error)
    except Exception as other:
        return f"(its text cannot be made: its __str__ raises {type(other).__name__})"
    return shortened(text)


def trace_of(error: BaseException, trace: TracebackType | None) -> str:
    """The traceback as Python prints it, from ``trace`` on, shortened."""
    lines = traceback.format_exception(type(error), error, trace)
    return shortened("".join(shortened(line) for line in lines).rstrip(), _LONGEST_TRACE)


def few(names: list[str]) -> str:
    """The first of many names."""
    shown = ", ".join(names[:3])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > 3 else shown or "nothing"


def from_here(path: str | Path) -> str:
    """A path as a person at this terminal would type it: relative where it lies in the working directory."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the working directory was removed
        return str(path)
