"""Standard streams whose reader may leave, as ``head`` does: what nobody reads is no reason to fail."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from evener.core.os_errors import CLOSED


class Unheard:
    """A text stream that hands on what is written, and drops it once its reader is gone.

    Args:
        whatever: Drops it after any error of the operating system, as a full disk; else these are raised.
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
        except (OSError, ValueError) as error:  # a ValueError: the stream is closed in this process
            self._gone = True
            _lead_nowhere(self._stream)
            if isinstance(error, OSError) and not self._whatever and error.errno not in CLOSED:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _lead_nowhere(stream: Any) -> None:
    """What the stream still holds is written somewhere, or Python's end would fail at it."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def unheard(stream: TextIO | None) -> Any:
    """``stream`` for words that nobody has to hear; None, as Python has it where it was closed, leads nowhere."""
    return Unheard(io.StringIO() if stream is None else stream, whatever=True)


def open_missing() -> None:
    """Descriptors 0 to 2 are something: else the next file that is opened would get what is written to them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def guard() -> None:
    """The standard output and error of this process are such streams from now on."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, Unheard):
            setattr(sys, name, unheard(None) if stream is None else Unheard(stream))


@contextmanager
def guarded() -> Iterator[None]:
    """The same, for a while; flushed at its end, while somebody can still hear of a full disk."""
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
