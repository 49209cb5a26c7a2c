"""Texts of bounded size: what an exception says, whatever it does when it is asked, and lists of names.

An exception may carry a tensor of a million numbers in its text, and its ``__str__`` may itself raise. Neither may keep
a person from reading what went wrong, nor fill a terminal.
"""

from __future__ import annotations

import traceback
from types import TracebackType

_LONGEST = 4000
"""Characters of a text that is shown."""
_LONGEST_TRACE = 20_000
_TAIL = 4
"""The part of them that is the end of the text is one in so many."""


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
