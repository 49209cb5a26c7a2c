"""Lengths and checksums of a checkpoint's files, so that a damaged one is not gone on from.

CRC-32 finds every burst of errors of up to 32 bits and misses one of 2**32 others; it is no protection against malice.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

SUMS = "sums.json"
_CHUNK = 1 << 22

Sums = Mapping[str, tuple[int, int]]
"""Of each file, by name, its length in bytes and its CRC-32."""


def sum_of(path: Path) -> tuple[int, int]:
    """Length in bytes, and CRC-32."""
    nbytes = crc = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            nbytes, crc = nbytes + len(chunk), zlib.crc32(chunk, crc)
    return nbytes, crc


def write(place: Path, sums: Sums) -> None:
    """Leaves them beside the files, on the disk itself."""
    with (place / SUMS).open("w") as file:
        json.dump(sums, file)
        file.flush()
        os.fsync(file.fileno())


def damage(place: Path, part: int = 0, parts: int = 1) -> str:
    """What is wrong with the files of a checkpoint, in words; empty if nothing is.

    Args:
        part: Every ``parts``-th file from this one on is looked at.
    """
    try:
        sums = json.loads((place / SUMS).read_text())
        return next(filter(None, (_wrong(place / name, *sums[name]) for name in _own(sums, part, parts))), "")
    except (OSError, ValueError, TypeError) as error:
        return f"{SUMS} cannot be read: {error}"


def _own(sums: Sums, part: int, parts: int) -> Sequence[str]:
    return sorted(sums)[part::parts]


def _wrong(path: Path, nbytes: int, crc: int) -> str:
    try:
        found = sum_of(path)
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    if found[0] != nbytes:
        return f"{path.name} has {found[0]} bytes, and {nbytes} were written"
    return "" if found[1] == crc else f"{path.name} is not what was written: its checksum differs"
