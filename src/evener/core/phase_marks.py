"""Marks, for code that may run without a watchdog, that it waits for other ranks."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class PhaseWatch(Protocol):
    """What a mark is made on: the watchdog of this process."""

    @property
    def is_waiting(self) -> bool:
        """Whether a wait is marked already."""

    def wait(self, name: str) -> AbstractContextManager[object]:
        """Marks a wait for other ranks while the block runs."""


process_watchdogs: list[PhaseWatch] = []
"""Those that run in this process, the innermost last."""


def marked(name: str) -> AbstractContextManager[object]:
    """Marks a wait for other ranks on the watchdog of this process, for code that may run without one.

    A mark that is there already stays, for it says more. Other threads than the main one have no place of their own:
    the main thread waits for them.
    """
    watchdog = process_watchdogs[-1] if process_watchdogs else None
    is_main = threading.current_thread() is threading.main_thread()
    if watchdog is None or not is_main or watchdog.is_waiting:
        return nullcontext()
    return watchdog.wait(name)
