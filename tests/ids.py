"""Names of a test's cases, the same in every process that collects them."""

from __future__ import annotations

import re


def placeless(value: object) -> str:
    """What ``str`` says, without the places in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
