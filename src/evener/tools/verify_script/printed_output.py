"""Records what a script prints and logs, as lines with their place in the script, and compares the numbers in them."""

from __future__ import annotations

import io
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from evener.tools.verify.comparison import LIMIT
from evener.tools.verify_script.events import Printed, ScriptLine

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")
_TIME_OF_DAY = re.compile(
    r"\b\d{4}[-/]\d\d[-/]\d\d\b|\b20\d{6}[-_T]?\d{4,6}\b"  # a date, or both in the name of a directory
    r"|(?<![\w.:])\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?![\w:]|\.\d)"
)
_GRAPH = re.compile(r"grad_fn=<[^>]*>")
_MOST = 100_000
"""Largest number of lines that are recorded."""
_ROUNDING = 1.01
"""Largest difference of numbers that printing explains, in units of the last printed digit."""


class Listening(io.TextIOWrapper):
    """A standard output that records lines instead of showing them. What is written to its ``buffer`` is discarded.

    Args:
        here: Returns the line of the script that prints.
        event: Returns the number of events so far.
    """

    def __init__(self, here: Callable[[], ScriptLine], event: Callable[[], int]) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")
        self._here, self._event = here, event
        self._pending: Printed | None = None
        self.printed: list[Printed] = []

    def write(self, text: str) -> int:
        for piece in re.split(r"(?<=[\n\r])", text):
            if piece:
                self._add(piece)
        return len(text)

    def _add(self, piece: str) -> None:
        if self._pending is None:
            self._pending = Printed("", self._here(), self._event())
        self._pending.text += piece.rstrip("\r\n")
        if piece[-1] in "\n\r":
            self.finish()

    def finish(self) -> None:
        """Ends the current line and records it, unless it is blank."""
        if self._pending is not None and self._pending.text.strip() and len(self.printed) < _MOST:
            self.printed.append(self._pending)
        self._pending = None

    @contextmanager
    def logged(self, is_own: Callable[[str], bool]) -> Iterator[None]:
        """Also records the messages that the user's code gives to :mod:`logging`, wherever they are sent.

        Args:
            is_own: Returns True if a file is the user's own code.
        """
        before = logging.getLogRecordFactory()

        def made(*args: Any, **kwargs: Any) -> logging.LogRecord:
            record = before(*args, **kwargs)
            if is_own(record.pathname) and len(self.printed) < _MOST:
                line = ScriptLine(record.pathname, record.lineno)
                self.printed.append(Printed(_message(record), line, self._event()))
            return record

        logging.setLogRecordFactory(made)
        try:
            yield
        finally:
            logging.setLogRecordFactory(before)


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):  # wrong arguments, which logging reports itself
        return str(record.msg)


class Number(NamedTuple):
    """A number in a text."""

    value: float
    resolution: float
    """Value of one unit of its last digit; 0 for an integer."""


class OutputComparison:
    """Compares a text with what one device printed. Calling it returns True if the texts differ.

    Numbers that vary between runs on one device, such as times, are ignored. So are dates, times of the day, names of
    autograd nodes, spaces, and the number of ranks.

    Args:
        reference: Text that one device printed.
        disturbed: Texts that its disturbed runs printed at the same place.
        eps: Relative unit in the last place.
        ranks: Number of ranks of the divided run.
    """

    def __init__(self, reference: str, disturbed: Sequence[str], eps: float, ranks: int) -> None:
        self._words, self._numbers = _parted(reference)
        self._ranks, self._eps = ranks, eps
        others = [_parted(text) for text in disturbed]
        self._is_settled = all(words == self._words for words, _ in others)
        self._floors = [
            max((abs(a.value - numbers[i].value) for _, numbers in others), default=0.0)
            for i, a in enumerate(self._numbers if self._is_settled else ())
        ]

    def __call__(self, text: str) -> bool:
        if not self._is_settled:
            return False
        words, numbers = _parted(text)
        return words != self._words or any(map(self._apart, self._numbers, numbers, self._floors))

    def _apart(self, a: Number, b: Number, floor: float) -> bool:
        is_of_ranks = a.value == 1 and b.value == self._ranks
        is_of_chance = floor > math.sqrt(self._eps) * abs(a.value) + a.resolution
        if a.value == b.value or is_of_ranks or is_of_chance:
            return False
        floor = max(floor, self._eps * abs(a.value) if a.resolution else 0.0)
        return abs(a.value - b.value) > _ROUNDING * max(a.resolution, b.resolution) + LIMIT * floor


def _parted(text: str) -> tuple[list[str], list[Number]]:
    """Splits a text into the words between the numbers, and the numbers. Dates and times of the day are words, all
    alike, and so are names of autograd nodes in the text of a tensor.
    """
    text = _GRAPH.sub("grad_fn", _TIME_OF_DAY.sub("(time)", text))
    words = ["".join(word.split()) for word in _NUMBER.split(text)]  # spaces align numbers of other lengths
    return words, [_number(found) for found in _NUMBER.findall(text)]


def _number(text: str) -> Number:
    mantissa, _, exponent = text.lower().partition("e")
    _, point, digits = mantissa.partition(".")
    resolution = 10.0 ** (int(exponent or 0) - len(digits)) if point or exponent else 0.0
    return Number(float(text), resolution)
