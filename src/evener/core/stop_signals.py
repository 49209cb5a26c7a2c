"""The signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
"""SIGINT and SIGQUIT (Ctrl-C and Ctrl-\\), SIGTERM, SIGUSR1 (SLURM) and SIGHUP (a closing terminal)."""


class StopSignal(KeyboardInterrupt):
    """A stop signal that came while no run was there to save its state."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


@contextmanager
def interrupting() -> Iterator[None]:
    """Raises :class:`StopSignal` in the main thread on a stop signal, so that temporary directories are removed.

    By default all of them but SIGINT would end the process without a word. Signals that are ignored, as SIGHUP is under
    nohup, stay ignored, and a run inside the block may handle them in its own way.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked child, such as a worker, ends as if it had no handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        raise StopSignal(number)

    usual = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    before = {number: handler for number, handler in before.items() if handler in usual}
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
