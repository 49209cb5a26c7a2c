"""Standard streams that tolerate a reader that leaves early, as ``head`` does: unread output is not an error."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from evener.core.os_errors import CLOSED
from evener.core.text import printable
from evener.files import PACKAGE


def to_stderr(text: str) -> None:
    """Prints a line to standard error, if that is open and has a reader."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def shorten_own_warnings() -> None:
    """Makes warnings of Evener's own code one line in this process, without the line of source that gives them."""
    before = warnings.formatwarning

    def formatted(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
        if str(PACKAGE) in filename:
            return f"evener: {printable(str(message))}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = formatted


class Unheard:
    """A text stream that forwards output to ``stream``, and discards it once the reader is gone.

    Args:
        whatever: If True, discards output after any operating system error, such as a full disk. If False, raises them.
    """

    def __init__(self, stream: Any, whatever: bool = False) -> None:
        self._stream, self._whatever, self._gone = stream, whatever, False

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        if self._gone:
            return
        try:
            act()
        except (OSError, ValueError) as error:  # ValueError: this process has closed the stream
            self._gone = True
            _lead_nowhere(self._stream)
            if isinstance(error, OSError) and not self._whatever and error.errno not in CLOSED:
                raise OSError(error.errno, error.strerror, getattr(self._stream, "name", None)) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _lead_nowhere(stream: Any) -> None:
    """Redirects the stream to /dev/null: otherwise Python fails at exit, when it flushes the stream's buffer."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def unheard(stream: TextIO | None) -> Any:
    """Wraps ``stream`` for output that may be lost. For None, which Python sets if the stream was closed at start-up,
    returns a stream that discards everything.
    """
    return Unheard(io.StringIO() if stream is None else stream, whatever=True)


def open_missing() -> None:
    """Opens /dev/null for each of the descriptors 0 to 2 that is closed. Otherwise the next file that is opened would
    get the descriptor, and what is printed would be written into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def guard() -> None:
    """Replaces sys.stdout and sys.stderr by :class:`Unheard` streams."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, Unheard):
            setattr(sys, name, unheard(None) if stream is None else Unheard(stream))


@contextmanager
def guarded() -> Iterator[None]:
    """Calls `guard`, and restores both streams after the block. Flushes them first, so that a full disk is reported."""
    before = sys.stdout, sys.stderr
    guard()
    try:
        yield
        sys.stdout.flush()
    except SystemExit:
        sys.stdout.flush()
        raise
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        sys.stdout, sys.stderr = before
