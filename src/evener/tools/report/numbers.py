"""Numbers of a report as texts, with three significant digits and a unit that suits them."""

from __future__ import annotations

import math

from evener.core.config.sizes import size_words
from evener.tools.plan.text import seconds_text

_TIMES = (
    (1e-3, 1e-6, "us"),
    (1.0, 1e-3, "ms"),
    (120.0, 1.0, "s"),
    (7200.0, 60.0, "min"),
    (math.inf, 3600.0, "h"),
)
_SIZES = tuple((999.5 * 1024**n, 1024.0**n, unit) for n, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB")))
_GREATEST = 1e300
"""Numbers of this size or larger are no measurements, and NaN is none."""


def value_text(value: float | None, unit: str = "") -> str:
    """Formats a number in a unit of `evener.tools.report.schema.Series`: ``s``, ``B``, ``1`` (a fraction, shown in per
    cent), or another one that is shown as it is."""
    if value is None or not abs(value) < _GREATEST:
        return "–"
    if unit == "s":
        return "0 s" if not value else f"-{seconds_text(-value)}" if value < 0 else seconds_text(value)
    if unit == "B":
        return f"-{size_words(round(-value))}" if value < 0 else size_words(round(value))
    if unit == "1":
        return f"{100 * value:.3g}%"
    return f"{plain_text(value)} {unit}".strip()


def plain_text(value: float) -> str:
    """Formats a number without a unit: whole numbers with commas, others with four significant digits."""
    if 1000 <= abs(value) < 1e15 or (value == int(value) and abs(value) < 1e15):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def axis_unit(unit: str, highest: float) -> tuple[float, str]:
    """Returns the factor and the name of the unit for an axis that reaches to ``highest``."""
    if unit == "1":
        return 0.01, "%"
    if unit not in ("s", "B"):
        return 1.0, unit
    table = _TIMES if unit == "s" else _SIZES
    return next(((factor, name) for limit, factor, name in table if highest < limit), table[-1][1:])
