"""Parses and prints sizes of memory: ``24GB``, ``512MiB``, or one for each rank, ``24GB,12GB,-``."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from evener.errors import ConfigurationError

UNITS = {"": 1, "B": 1, **{f"{letter}B": 1000**n for n, letter in enumerate("KMGTP", 1)}}
UNITS |= {f"{letter}iB": 1024**n for n, letter in enumerate("KMGTP", 1)}
"""The bytes of each unit. Units with an ``i`` are powers of 1024, others powers of 1000."""
_EXACT = {unit.upper(): size for unit, size in UNITS.items()}
_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([a-zA-Z]*)")


def parse_size(text: str) -> int:
    """Parses a size and returns bytes, rounded down: ``1.5GiB`` is 1610612736.

    Raises:
        ConfigurationError: If ``text`` is no size of at least 1 byte.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = match and _EXACT.get(match[2].upper())
    nbytes = _exact(match[1], unit) if match is not None and unit is not None else 0
    if nbytes < 1:
        raise ConfigurationError(
            f"{text!r} is no size: write bytes, or a number with a unit, such as 24GB, 1.5GiB or 512MiB"
        )
    return nbytes


def _exact(number: str, unit: int) -> int:
    """Multiplies in fractions, because floats round to 53 bits. Returns 0 if the number overflows a float."""
    return int(Fraction(number) * unit) if math.isfinite(float(number)) else 0


def parse_limits(text: str | None, ranks: int) -> list[int | None]:
    """Parses one size for all ranks, or one for each. Returns the bytes of each rank; None for ``-``, no limit.

    Raises:
        ConfigurationError: If an entry is no size, or the number of entries is neither 1 nor ``ranks``.
    """
    if text is None:
        return [None] * ranks
    limits = [None if part.strip() == "-" else parse_size(part) for part in text.split(",")]
    if len(limits) not in (1, ranks):
        raise ConfigurationError(
            f"{text!r} has {len(limits)} limits for {ranks} ranks: give one for all, or one for each, with - for none"
        )
    return limits * ranks if len(limits) == 1 else limits


def size_words(nbytes: float) -> str:
    """Formats a size in powers of 1024, with three significant digits."""
    size, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 999.5 or unit == "TiB":
            break
        size /= 1024
    return f"{nbytes:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
