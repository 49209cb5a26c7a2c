"""Delays the destruction of process groups and related objects after a communication error, to avoid a deadlock.

A destructor of DDP or of a process group waits for a gloo thread while it holds the GIL. Just after an error that
thread may need the GIL to free a Python object: a deadlock. So the objects are kept alive. A process that ends never
frees them; a process that goes on frees them two starts later.
"""

from __future__ import annotations

from evener.distributed.restart_count import generation

_graves: dict[int, list[object]] = {}
"""The kept objects, by the number of the start in which they were used."""


def bury(*things: object) -> None:
    """Keeps ``things`` alive until `bury` is called in the start after the next, or a later one."""
    now = generation()
    _graves.setdefault(now, []).extend(things)
    for start in [start for start in _graves if start < now - 1]:
        del _graves[start]
