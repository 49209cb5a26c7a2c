"""Which driver a CUDA needs, and which code a card can run.

NVIDIA, CUDA Toolkit Release Notes (https://docs.nvidia.com/cuda/cuda-toolkit-release-notes): table 2, "CUDA Toolkit and
Minimum Required Driver Version for CUDA Minor Version Compatibility", and table 3, "CUDA Toolkit and Corresponding
Driver Versions", of the columns for Linux. NVIDIA, CUDA Compatibility, "Minor Version Compatibility"
(https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html), says what that leaves out: PTX is
not translated by a driver that is older than the toolkit which made it. CUDA C++ Programming Guide, "Application
Compatibility": a binary runs on cards of its major version from its own minor version on.
"""

from __future__ import annotations

import re
from typing import Literal

Version = tuple[int, ...]

LEAST_DRIVERS: dict[int, Version] = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}
"""By major version of CUDA, the oldest driver on which all of its minor versions run."""

OWN_DRIVERS: dict[Version, Version] = {
    (11, 0): (450, 51, 6),
    (11, 1): (455, 23),
    (11, 2): (460, 27, 3),
    (11, 3): (465, 19, 1),
    (11, 4): (470, 42, 1),
    (11, 5): (495, 29, 5),
    (11, 6): (510, 39, 1),
    (11, 7): (515, 43, 4),
    (11, 8): (520, 61, 5),
    (12, 0): (525, 60, 13),
    (12, 1): (530, 30, 2),
    (12, 2): (535, 54, 3),
    (12, 3): (545, 23, 6),
    (12, 4): (550, 54, 14),
    (12, 5): (555, 42, 2),
    (12, 6): (560, 28, 3),
    (12, 8): (570, 26),
    (12, 9): (575, 51, 3),
    (13, 0): (580, 65, 6),
    (13, 1): (590, 44, 1),
    (13, 2): (595, 45, 4),
}
"""By release of CUDA, the driver that came with its first edition ("GA")."""

Code = Literal["binary", "ptx", "none"]


def version(text: str) -> Version:
    """``535.104.05`` as numbers; of what is no version, none.

    The parts are numbers and no decimals: 570.124 is newer than 570.26.
    """
    return tuple(int(part) for part in re.findall(r"\d+", text))


def least_driver(cuda: str) -> Version | None:
    """The oldest driver with which a program for this CUDA starts; None of a CUDA that is not in the table."""
    return LEAST_DRIVERS.get((version(cuda) or (0,))[0])


def own_driver(cuda: str) -> Version | None:
    """The driver that came with this CUDA, and knows all that it makes; None of one that is not in the table."""
    return OWN_DRIVERS.get(version(cuda)[:2])


def text_of(found: Version) -> str:
    """As NVIDIA writes it, with two digits in all parts but the first."""
    return ".".join([str(found[0]), *(f"{part:02d}" for part in found[1:])])


def code_for(card: str, architectures: tuple[str, ...]) -> Code:
    """What of the code for ``architectures`` a card of one of NVIDIA's can run.

    Args:
        card: ``sm_86``.
        architectures: ``sm_80`` and such are binaries, ``compute_90`` is PTX. ``sm_90a`` runs on 9.0 alone, and
            ``sm_100f`` on those of its family, which is its major version.
    """
    own = _parsed(card)
    found = [(name.startswith("compute"), parsed) for name in architectures if (parsed := _parsed(name))]
    if own is None:
        return "none"
    if any(not ptx and _runs(own, code) for ptx, code in found):
        return "binary"
    return "ptx" if any(ptx and _translates(own, code) for ptx, code in found) else "none"


def _runs(card: tuple[int, int, str], code: tuple[int, int, str]) -> bool:
    if code[2] == "a":
        return card[:2] == code[:2]
    return card[0] == code[0] and card[1] >= code[1]


def _translates(card: tuple[int, int, str], code: tuple[int, int, str]) -> bool:
    return card[:2] >= code[:2] if not code[2] else _runs(card, code)


def _parsed(name: str) -> tuple[int, int, str] | None:
    """``sm_103a`` is (10, 3, "a"): the last digit is the minor version."""
    found = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)([af]?)", name)
    return (int(found[1]), int(found[2]), found[3]) if found else None
