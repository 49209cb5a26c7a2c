"""Intervals at which something is repeated: ``500`` or ``500steps``, ``10min``, ``1epoch``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from evener.errors import ConfigurationError

_UNITS = {
    "": "steps",
    "step": "steps",
    "steps": "steps",
    "epoch": "epochs",
    "epochs": "epochs",
    "s": "seconds",
    "sec": "seconds",
    "min": "minutes",
    "h": "hours",
}
_SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}


@dataclass(frozen=True)
class Interval:
    """An interval in steps, epochs or seconds. Exactly one of the three is above 0."""

    steps: int = 0
    epochs: int = 0
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str | int) -> Interval:
        """Parses a number and its unit; a number alone counts steps.

        Raises:
            ConfigurationError: If the text is no number with a known unit, is 0, or is a fraction of a step or epoch.
        """
        matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(text))
        unit = _UNITS.get(matched[2]) if matched else None
        if matched is None or unit is None:
            raise ConfigurationError(
                f"{text!r} is no interval: write a number of steps, or one with a unit such as 10min, 2h or 1epoch"
            )
        number = float(matched[1])
        if number == 0 or (unit in ("steps", "epochs") and number % 1):
            raise ConfigurationError(f"{text!r} is no interval: {unit} are whole and above 0")
        if unit == "steps":
            return cls(steps=int(number))
        return cls(epochs=int(number)) if unit == "epochs" else cls(seconds=number * _SECONDS[unit])
