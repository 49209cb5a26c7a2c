"""Tables of the driver that each CUDA version needs, and rules for the code that a card can run.

Sources: NVIDIA, CUDA Toolkit Release Notes (https://docs.nvidia.com/cuda/cuda-toolkit-release-notes): table 2, "CUDA
Toolkit and Minimum Required Driver Version for CUDA Minor Version Compatibility", and table 3, "CUDA Toolkit and
Corresponding Driver Versions", columns for Linux. NVIDIA, CUDA Compatibility, "Minor Version Compatibility"
(https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html): a driver does not translate PTX
that was made by a newer toolkit. CUDA C++ Programming Guide, "Application Compatibility": a binary runs on cards with
its major version and the same or a higher minor version.
"""

from __future__ import annotations

import re
from typing import Literal

LEAST_DRIVERS = {"11": "450.80.02", "12": "525.60.13", "13": "580"}
"""For each major version of CUDA, the oldest driver that runs all of its minor versions."""

_OWN_DRIVERS = """
    11.0=450.51.06 11.1=455.23 11.2=460.27.03 11.3=465.19.01 11.4=470.42.01 11.5=495.29.05 11.6=510.39.01
    11.7=515.43.04 11.8=520.61.05 12.0=525.60.13 12.1=530.30.02 12.2=535.54.03 12.3=545.23.06
    12.4=550.54.14 12.5=555.42.02 12.6=560.28.03 12.8=570.26 12.9=575.51.03 13.0=580.65.06 13.1=590.44.01
    13.2=595.45.04
"""
OWN_DRIVERS = {cuda: driver for cuda, _, driver in (row.partition("=") for row in _OWN_DRIVERS.split())}
"""For each CUDA release, the driver that was shipped with its first version ("GA")."""

Code = Literal["binary", "ptx", "none"]


def version(text: str) -> tuple[int, ...]:
    """Parses ``535.104.05`` as a tuple of numbers; empty if the text has no numbers.

    The parts are integers, not decimals: 570.124 is newer than 570.26.
    """
    return tuple(int(part) for part in re.findall(r"\d+", text))


def least_driver(cuda: str) -> str | None:
    """Returns the oldest driver that runs programs for this CUDA version. Returns None if it is not in the table."""
    return LEAST_DRIVERS.get(cuda.partition(".")[0])


def own_driver(cuda: str) -> str | None:
    """Returns the driver that was shipped with this CUDA version, and supports all of its features.

    Returns None if the version is not in the table.
    """
    return OWN_DRIVERS.get(".".join(cuda.split(".")[:2]))


def code_for(card: str, architectures: tuple[str, ...]) -> Code:
    """Returns the best kind of code among ``architectures`` that an NVIDIA card can run.

    Args:
        card: The card's architecture, such as ``sm_86``.
        architectures: ``sm_80`` is a binary, ``compute_90`` is PTX. ``sm_90a`` runs on 9.0 only, and ``sm_100f`` on
            cards of its family, that is, of its major version.
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
    """Parses ``sm_103a`` as (10, 3, "a"): the last digit is the minor version. Returns None for other text."""
    found = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)([af]?)", name)
    return (int(found[1]), int(found[2]), found[3]) if found else None
