"""Compares what ``evener.print`` is given on the ranks, of which one alone is seen.

A loop that counts right answers of its own samples, or multiplies a loss by their number, prints a number of rank 0
alone, and nothing on the screen shows that. So the ranks remember the numbers of their texts. A checksum goes with the
next exchange, which the loop makes anyway, and only if it differs do they tell each other the texts::

    rank 0   print "accuracy 2/60" ─ 2 60 ─┐
    rank 1   print "accuracy 1/60" ─ 1 60 ─┴▶ the end of a batch ─▶ a warning, once for a line of the loop
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from evener.training.prepare.sample_tensor import plain_of

_MOST = 100
"""Maximum of texts that are remembered between two exchanges."""
_LONGEST = 2000
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_UNIT = r"(?:[num\u00b5]?s|secs?|seconds?|m|mins?|minutes?|h|hours?|[kmgt]i?b)\b|(?:\w+/)(?:s|sec|second|min|hour)\b"
_WORD = (
    r"\w*(?:time|elapsed|took|eta|duration|speed|throughput|latency|fps|sps|memory|rank|device|pid|data)\w*"
)
_OF_THE_RANK = re.compile(
    rf"\d+(?::\d\d)+(?:\.\d+)?|\w+:\d+|\b{_WORD}\W{{0,3}}{_NUMBER}(?:\s*\(\s*{_NUMBER}\s*\))?"
    rf"|{_NUMBER}\s?(?:{_UNIT})|\b(?:s|ms|sec)/\w+\W{{0,3}}{_NUMBER}|0x[0-9a-f]+",
    re.IGNORECASE,
)
"""Times, sizes of memory, devices and the like, which are of a rank."""
_DIFFERENT = (
    "evener.print at {where} shows the numbers of rank 0, and those of rank {rank} are others: {own!r} and {other!r}. "
    "Numbers that are counted or added up from a rank's own samples are not those of the batch: count rows that "
    "evener.gather gives, and multiply or divide a prepared loss by evener.batch_size() in place of len(x)"
)


class Text(NamedTuple):
    """What a rank has printed, or would have."""

    where: str
    """The line of the loop."""
    text: str


class PrintedTexts:
    """The texts of this rank since the last exchange, and the lines of the loop that need no comparison any more."""

    def __init__(self) -> None:
        self._texts: list[Text] = []
        self._settled: set[str] = set()
        self._places: dict[str, tuple[str, int]] = {}

    def note(self, file: str, number: int, values: Sequence[Any]) -> None:
        """Remembers what the loop prints at a line of a file."""
        where = f"{Path(file).name}:{number}"
        self._places[where] = file, number
        if where not in self._settled and len(self._texts) < _MOST:
            text = " ".join(filter(None, map(_shown, values)))[:_LONGEST]
            if numbers_of(text):
                self._texts.append(Text(where, text))

    @property
    def checksum(self) -> float:
        """A number that is the same on ranks that printed the same numbers; 0 without any."""
        if not self._texts:
            return 0.0
        return float(
            zlib.crc32(repr([(each.where, numbers_of(each.text)) for each in self._texts]).encode()) or 1
        )

    def compare(self, checksums: Sequence[float], gather: Callable[[Any], list[Any]], rank: int) -> None:
        """Ends the texts so far. Warns on rank 0 if they differ; a collective call then.

        Args:
            checksums: Those of all ranks.
            gather: Returns the objects of all ranks.
        """
        own, self._texts = self._texts, []
        if len(set(checksums)) == 1:
            return
        said = gather(own)
        for where in dict.fromkeys(each.where for texts in said for each in texts):
            of_ranks = [[each.text for each in texts if each.where == where] for texts in said]
            if len({len(texts) for texts in of_ranks}) > 1:
                self._settled.add(where)  # of some ranks alone, as under evener.is_main()
                continue
            other = _first_difference(of_ranks)
            if other is not None:
                self._settled.add(where)
                if rank == 0:
                    message = _DIFFERENT.format(where=where, **other)
                    warnings.warn_explicit(message, UserWarning, *self._places[where])


def numbers_of(text: str) -> list[str]:
    """Returns the numbers of a text, without times and others that are of a rank."""
    return re.findall(_NUMBER, _OF_THE_RANK.sub(" ", text))


def _first_difference(of_ranks: Sequence[Sequence[str]]) -> dict[str, Any] | None:
    for texts in zip(*of_ranks, strict=True):
        numbers = [numbers_of(text) for text in texts]
        for rank, text in enumerate(texts):
            if numbers[rank] != numbers[0]:
                return {"rank": rank, "own": texts[0].strip(), "other": text.strip()}
    return None


def _shown(value: Any) -> str:
    """Returns what is printed of a text or a number; empty for others, whose texts may be long or of the rank."""
    value = plain_of(value) if isinstance(value, Tensor) else value
    if type(value) is Tensor:
        return str(value.item()) if value.numel() == 1 else ""
    return str(value) if isinstance(value, str | int | float) else ""
