"""What ranks that lost others would have closed, and all that hangs on it, kept until nobody waits in it any more.

A destructor of DDP or of a process group waits for a thread of gloo with Python's lock held. Just after an error that
thread may want the lock to free an object of Python, and then nothing moves again. So nothing of it is given up then:
in a process that ends it never is, in one that goes on two starts later.
"""

from __future__ import annotations

from evener.distributed.restart_count import generation

_graves: dict[int, list[object]] = {}
"""By the start of the ranks in which it was in use."""


def bury(*things: object) -> None:
    """Keeps ``things`` until something of the start after the next is buried."""
    now = generation()
    _graves.setdefault(now, []).extend(things)
    for start in [start for start in _graves if start < now - 1]:
        del _graves[start]
