"""Tells the watchdog, if one runs, that the process waits for other ranks."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class PhaseWatch(Protocol):
    """Interface of the watchdog of this process, as far as `marked` needs it."""

    @property
    def is_waiting(self) -> bool:
        """True if a wait is marked already."""

    def wait(self, name: str) -> AbstractContextManager[object]:
        """Marks a wait for other ranks while the block runs."""


process_watchdogs: list[PhaseWatch] = []
"""The watchdogs that run in this process, the innermost last."""


def marked(name: str) -> AbstractContextManager[object]:
    """Marks a wait for other ranks on the watchdog of this process while the block runs.

    Does nothing if there is no watchdog. Does nothing if a wait is marked already, since the outer mark says more. Does
    nothing outside of the main thread: the watchdog follows the main thread, which waits for the others.
    """
    watchdog = process_watchdogs[-1] if process_watchdogs else None
    is_main = threading.current_thread() is threading.main_thread()
    if watchdog is None or not is_main or watchdog.is_waiting:
        return nullcontext()
    return watchdog.wait(name)
