"""Warnings that name the rank, because many ranks print to one terminal."""

from __future__ import annotations

import warnings

from evener.distributed.environment import detect


def warn(text: str) -> None:
    """Issues a warning. If there are several ranks, it begins with ``[rank N]``."""
    place = detect()
    prefix = f"[rank {place.rank}] " if place.world_size > 1 else ""
    warnings.warn(prefix + text, stacklevel=2)
