"""Lengths and checksums of a checkpoint's files, so that no run resumes from a damaged one.

CRC-32 finds every burst of errors of up to 32 bits, and misses one in 2**32 others. It does not protect against malice.
The list of checksums itself may be malicious: it may name only files that Evener writes, and these are not read beyond
their listed length.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from evener.files import open_regular, read_json

SUMS = "sums.json"
NAME = re.compile(r"rest\.pt|evaluation\.json|evener\.json|tensors\.json|\.metadata|__[0-9]+_[0-9]+\.distcp")
"""Names of files that Evener writes into a checkpoint."""
_CHUNK = 1 << 22

Sums = Mapping[str, tuple[int, int]]
"""For each file, by name, its length in bytes and its CRC-32."""


def sum_of(path: Path) -> tuple[int, int]:
    """Returns length in bytes and CRC-32 of a file."""
    nbytes = crc = 0
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            nbytes, crc = nbytes + len(chunk), zlib.crc32(chunk, crc)
    return nbytes, crc


def write(place: Path, sums: Sums) -> None:
    """Writes the sums beside the files, and syncs them to disk."""
    with (place / SUMS).open("w") as file:
        json.dump(sums, file)
        file.flush()
        os.fsync(file.fileno())


def damage(place: Path, part: int = 0, parts: int = 1) -> str:
    """Describes what is wrong with the files of a checkpoint. Returns "" if nothing is.

    Args:
        part: Index of the first file to check; every ``parts``-th file from it on is checked.
    """
    try:
        sums = sums_in(place)
        return next(filter(None, (_wrong(place / name, *sums[name]) for name in _own(sums, part, parts))), "")
    except (OSError, ValueError) as error:
        return f"{SUMS} cannot be read: {error}"


def lacking(place: Path, names: Collection[str]) -> str:
    """Names one of the files ``names`` that has no checksum, in a message. Returns "" if all have one."""
    try:
        missing = sorted(set(names) - sums_in(place).keys())
    except (OSError, ValueError) as error:
        return f"{SUMS} cannot be read: {error}"
    return f"{SUMS} has no checksum of {missing[0]}" if missing else ""


def sums_in(place: Path) -> dict[str, tuple[int, int]]:
    """Returns the sums of a checkpoint.

    Raises:
        OSError: If they cannot be read.
        ValueError: If they are not what :func:`write` writes.
    """
    return checked(read_json(place / SUMS))


def checked(found: Any) -> dict[str, tuple[int, int]]:
    """Returns the sums that JSON holds. The names in them are those of Evener's own files, without directories.

    Raises:
        ValueError: If it holds anything else.
    """
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}")
    for name, entry in found.items():
        numbers = isinstance(entry, list) and len(entry) == 2 and all(type(number) is int for number in entry)
        if not numbers or entry[0] < 0 or not NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no file of a checkpoint with its length and checksum")
    return {name: (nbytes, crc) for name, (nbytes, crc) in found.items()}


def _own(sums: Sums, part: int, parts: int) -> Sequence[str]:
    return sorted(sums)[part::parts]


def _wrong(path: Path, nbytes: int, crc: int) -> str:
    try:
        length = path.stat().st_size
        found = sum_of(path) if length == nbytes else (length, crc)
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    if found[0] != nbytes:
        return f"{path.name} has {found[0]} bytes, and {nbytes} were written"
    return "" if found[1] == crc else f"{path.name} is not what was written: its checksum differs"
