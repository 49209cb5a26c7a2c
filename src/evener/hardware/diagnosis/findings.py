"""Findings about a machine, and their levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["wrong", "slow", "note"]
LEVELS: dict[Level, str] = {
    "wrong": "a device that torch is there for cannot train",
    "slow": "it trains, slower or less safely than it could",
    "note": "worth knowing; nothing need be done",
}
"""Descriptions of the levels, the worst first."""


@dataclass(frozen=True)
class Finding:
    """A problem of a machine, and its remedy."""

    level: Level
    name: str
    seen: str
    remedy: str

    @property
    def message(self) -> str:
        """The finding in one line."""
        return f"{self.level}: {self.seen}; {self.remedy}"
