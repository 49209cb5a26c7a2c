"""Words from many ranks on one terminal: with the name of who says them."""

from __future__ import annotations

import warnings

from evener.distributed.environment import detect


def warn(text: str) -> None:
    """Warns with the rank in front, where there is more than one."""
    place = detect()
    prefix = f"[rank {place.rank}] " if place.world_size > 1 else ""
    warnings.warn(prefix + text, stacklevel=2)
