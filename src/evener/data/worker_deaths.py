"""Tells the death of a worker process while a value of it is waited for, and nowhere else.

PyTorch raises the death of a worker from a handler of SIGCHLD, wherever the main thread is: in a collective, while the
run saves, or on the way out with another error, whose place it takes. It says nothing of a worker that ended with
status 0. So here its handler only counts while somebody waits for that worker, and each wait begins with a look at the
workers.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from evener.core.stacks import listen, workers_of
from evener.core.stop_signals import STOP_SIGNALS
from evener.errors import DataError
from evener.torch_internals.data_workers import (
    ended_workers,
    is_torchs_handler,
    kept_iterator,
    lost_workers,
    tell_what_cannot_be_sent,
    worker_processes,
)

T = TypeVar("T")

_SECONDS = 1.0
"""How long the kernel may take to end a process whose sockets are closed already."""
_readers: weakref.WeakSet[Any] = weakref.WeakSet()
"""The iterators with workers that were waited for."""
_awaited: Any = None


def awaited(values: Iterator[Any], end: Any, limit: str) -> Any:
    """Returns ``next(values, end)`` of a DataLoader's iterator.

    Args:
        limit: The time limit of the DataLoader in words, for the message.

    Raises:
        DataError: If a worker has died, or has not given a value in time.
    """
    return _when_awaited(values, lambda: next(values, end), limit, lost_workers)


def begun(loader: DataLoader[Any], limit: str) -> Iterator[Any]:
    """Returns ``iter(loader)``, for which persistent workers are waited for.

    Args:
        limit: As for :func:`awaited`.

    Raises:
        DataError: If a worker has died.
    """
    return _when_awaited(kept_iterator(loader), lambda: iter(loader), limit, ended_workers)


def _when_awaited(
    values: Any, act: Callable[[], T], limit: str, missed: Callable[[Any], list[BaseProcess]]
) -> T:
    if not worker_processes(values):
        return act()
    try:
        with _waiting_for(values):
            _raise_if_any(missed(values))
            return act()
    except (RuntimeError, OSError, EOFError) as error:
        if not (death := _death(values, error)):
            raise
        raise DataError(
            f"{death}; a worker that was killed mostly ran out of memory or /dev/shm (use fewer workers), "
            f"one that is late reads slowly or is stuck ({limit}); "
            f"with 0 workers the data set is read in the main process, which shows where{workers_of(os.getpid())}"
        ) from error


@contextmanager
def _waiting_for(values: Iterator[Any]) -> Iterator[None]:
    """Context in which the death of a worker of ``values`` is raised in the main thread."""
    global _awaited
    _readers.add(values)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _only_while_awaited()
    before, _awaited = _awaited, values
    try:
        yield
    finally:
        _awaited = before


def leave_stopping_to_the_rank(_: int = 0) -> None:
    """Makes this worker do nothing on a signal that asks a run to stop; called when a worker begins.

    A scheduler or a terminal sends the signal to all processes of a job. The rank then saves and ends its workers, and
    needs their batches until then. Programs that the worker starts get the signals as ever.
    """
    listen()
    tell_what_cannot_be_sent()
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)


def begin_worker(given: Callable[[int], None] | None, number: int) -> None:
    """Begins a worker of a user's own loader, by the user's ``given`` function."""
    tell_what_cannot_be_sent()
    if given is not None:
        given(number)


def _only_while_awaited() -> None:
    """Makes PyTorch's handler of SIGCHLD, if it is installed, leave the death of workers to whoever waits for them."""
    torchs = signal.getsignal(signal.SIGCHLD)
    if is_torchs_handler(torchs):
        signal.signal(signal.SIGCHLD, _instead_of(torchs))  # type: ignore[arg-type]


def _instead_of(torchs: Callable[[int, FrameType | None], object]) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        try:
            torchs(number, frame)
        except RuntimeError:
            if not any(ended_workers(reader) for reader in list(_readers)):
                raise  # a worker of a loader that is not Evener's
        if _awaited is not None:
            _raise_if_any(lost_workers(_awaited))

    return handle


def _raise_if_any(lost: list[BaseProcess]) -> None:
    if lost:
        raise RuntimeError(_told(lost))


def _told(lost: list[BaseProcess]) -> str:
    """Returns which workers have died, and how; empty if none has."""
    return " and ".join(f"DataLoader worker (pid {each.pid}) {_how(each.exitcode or 0)}" for each in lost)


def _how(code: int) -> str:
    if code < 0:
        name = next((each.name for each in signal.Signals if each == -code), -code)  # some have no name
        return f"was killed by signal {name}"
    return f"ended with status {code} while it had samples to read"


def _death(values: Any, error: Exception) -> str:
    """Returns what an error says of a worker's death or lateness; empty if it says nothing of it.

    The samples that a worker has sent are fetched from it, so its death may first be seen as a lost connection.
    """
    if isinstance(error, RuntimeError):
        # torch says less of what the handler has raised.
        words = (str(each) for each in (error.__cause__, error))
        return next((each for each in words if each.startswith("DataLoader")), "")
    workers = worker_processes(values)
    gone = wait([worker.sentinel for worker in workers], _SECONDS)
    for worker in workers:
        if worker.sentinel in gone:
            worker.join()  # its sentinel closes a moment before it has ended
    return _told(lost_workers(values))
