"""Formats exceptions and names for a terminal: bounded in length, and without control characters.

The text of an exception may contain a tensor of a million numbers, and its ``__str__`` may itself raise. The name of a
file, a metric or a weight may contain control characters, which a terminal executes instead of showing them.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from types import TracebackType

from evener.core.elsewhere import url_of

_LONGEST = 4000
"""Maximum length of a shown text, in characters."""
_LONGEST_TRACE = 20_000
_TAIL = 4
"""A shortened text ends with the original's last ``longest / 4`` characters."""


_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, ESC among them, except tab and newline
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"  # invisible characters, and changes of writing direction
    "\ud800-\udfff\ufffe\uffff]"  # surrogates and noncharacters, which are not valid in UTF-8 or XML
)


def printable(text: str) -> str:
    """Escapes characters that a terminal or a drawing would execute rather than show, as ``\\x1b``."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str, longest: int = _LONGEST) -> str:
    """Shortens a text longer than ``longest`` characters to its beginning, its length and its end."""
    if len(text) <= longest:
        return text
    tail = longest // _TAIL
    return f"{text[: longest - tail]} ... ({len(text):,} characters in all) ... {text[-tail:]}"


def said(error: BaseException) -> str:
    """Returns ``str(error)``, shortened; a description if its ``__str__`` raises."""
    try:
        text = str(error)
    except Exception as other:
        return f"(its text cannot be made: its __str__ raises {type(other).__name__})"
    return shortened(text)


def trace_of(error: BaseException, trace: TracebackType | None) -> str:
    """Formats the traceback as Python prints it, starting at ``trace``, shortened."""
    lines = traceback.format_exception(type(error), error, trace)
    return shortened("".join(shortened(line) for line in lines).rstrip(), _LONGEST_TRACE)


def few(names: list[str]) -> str:
    """Lists the first three names, and the number of names if there are more."""
    shown = ", ".join(names[:3])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > 3 else shown or "nothing"


def counted(number: int, what: str) -> str:
    """Returns a number of things: ``1 step``, ``1,200 steps``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def from_here(path: str | Path) -> str:
    """Returns the path as a user would type it: as a URL if it lies elsewhere, relative if it is inside the working
    directory.
    """
    if url := url_of(Path(path)):
        return url
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the working directory was removed
        return str(path)
