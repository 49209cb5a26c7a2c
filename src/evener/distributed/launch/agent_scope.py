"""Changes of this process for the time in which torchrun's agent runs: its log lines, and the handlers of signals."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from evener.core.process_variables import variable_set

_ELASTIC = "torch.distributed.elastic"


@contextmanager
def quiet() -> Iterator[None]:
    """Hides the agent's log lines."""
    logger, silence = logging.getLogger(_ELASTIC), logging.NullHandler()
    before = logger.propagate
    logger.addHandler(silence)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(silence)


@contextmanager
def signals_restored() -> Iterator[None]:
    """Restores the signal handlers that the agent replaces, and keeps the agent from handling an ignored SIGHUP."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1]
    before = {number: signal.getsignal(number) for number in names}
    unheard = {signal.SIGHUP} if before[signal.SIGHUP] is signal.SIG_IGN else set()
    handled = ",".join(number.name for number in names if number not in unheard)
    with ExitStack() as stack:
        for number, handler in before.items():
            stack.callback(signal.signal, number, handler)
        stack.enter_context(variable_set("TORCHELASTIC_SIGNALS_TO_HANDLE", handled))
        yield
