"""Keeps Python's garbage collector out of imports, and from what is there already.

torch and Evener make 600,000 objects when they are imported. Nearly all live as long as the process. The collector
would go through them again and again while they come, which takes half a second of three.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Lets nothing be collected in this context."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def older_objects_set_apart() -> Iterator[None]:
    """Keeps the collector from looking through what was there before this context."""
    if gc.get_freeze_count():  # of somebody else
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
