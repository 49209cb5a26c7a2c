"""What memory is for, said by whoever makes it, to whoever counts it: neither needs to know the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Purpose(threading.local):
    category: str | None = None


_now = _Purpose()


@contextmanager
def made_as(category: str) -> Iterator[None]:
    """What this thread makes in the block is of the category, one of :data:`evener.hardware.memory.CATEGORIES`."""
    before, _now.category = _now.category, category
    try:
        yield
    finally:
        _now.category = before


def purpose() -> str | None:
    """The category of what this thread makes now, if somebody has said it."""
    return _now.category
