"""Lets code that allocates memory state the category, without knowing the tracker that counts it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Purpose(threading.local):
    category: str | None = None


_now = _Purpose()


@contextmanager
def made_as(category: str) -> Iterator[None]:
    """Assigns what this thread allocates in the block to one of :data:`evener.hardware.memory.CATEGORIES`."""
    before, _now.category = _now.category, category
    try:
        yield
    finally:
        _now.category = before


def purpose() -> str | None:
    """Returns the category that `made_as` has set for this thread. Returns None if there is none."""
    return _now.category
