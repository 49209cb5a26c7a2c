"""Private names of the worker processes of a DataLoader.

- ``_workers`` of a DataLoader's iterator are its processes, and ``_workers_status`` tells which of them still have
  work. torch looks itself only while it waits in vain, and then only at the end of a time limit, if there is one.
- ``_utils.signal_handling`` installs a handler of SIGCHLD that raises the death of a worker wherever the main thread
  is. It is known by the module that made it; there is no setting that leaves it out.
- ``Process._popen`` is what :mod:`multiprocessing` ends at the exit of the interpreter, by SIGTERM. There is no public
  way to end workers that leave SIGTERM to their parent.
- ``Queue._on_queue_feeder_error`` of :mod:`multiprocessing` is called with what could not be sent. There it is dropped,
  and whoever waits for it waits for ever. ``_utils.ExceptionWrapper`` is what torch's workers send an exception as.
- ``_iterator`` of a DataLoader with ``persistent_workers`` is the iterator whose workers the next pass uses again.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

import weakref
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

__all__ = [
    "end_by_kill",
    "ended_workers",
    "is_torchs_handler",
    "kept_iterator",
    "lost_workers",
    "tell_what_cannot_be_sent",
    "worker_processes",
]

_told_by_default = Queue._on_queue_feeder_error  # type: ignore[attr-defined]


def worker_processes(iterator: Any) -> list[BaseProcess]:
    """Returns the worker processes of a DataLoader's iterator; of any other iterator an empty list."""
    return list(getattr(iterator, "_workers", ()))


def ended_workers(iterator: Any) -> list[BaseProcess]:
    """Returns the worker processes that have ended."""
    return [worker for worker in worker_processes(iterator) if not worker.is_alive()]


def lost_workers(iterator: Any) -> list[BaseProcess]:
    """Returns the worker processes that have ended although they have work in this pass."""
    status = getattr(iterator, "_workers_status", ())
    have_work = [each for each, has_work in zip(worker_processes(iterator), status, strict=False) if has_work]
    return [worker for worker in ended_workers(iterator) if worker in have_work]


def end_by_kill(iterator: Any) -> None:
    """Makes torch and Python end the workers by SIGKILL where they would send SIGTERM.

    Processes hold no methods of their own: their files would stay open until the garbage collector finds the cycle.
    """
    for worker in worker_processes(iterator):
        for each in (worker, worker._popen):  # type: ignore[attr-defined]
            each.terminate = partial(_kill, weakref.ref(each))  # type: ignore[method-assign]


def _kill(reference: weakref.ref[Any]) -> None:
    process = reference()
    if process is not None:
        process.kill()


def is_torchs_handler(handler: object) -> bool:
    """Returns True for the handler of SIGCHLD that raises the death of a worker."""
    return getattr(handler, "__module__", None) == signal_handling.__name__


def kept_iterator(loader: DataLoader[Any]) -> Any:
    """Returns the iterator whose workers the next pass over ``loader`` uses again; None if it starts new ones."""
    return loader._iterator if loader.persistent_workers else None


def tell_what_cannot_be_sent() -> None:
    """Makes this worker send the error instead of a batch or an exception that cannot be sent to the main process."""
    Queue._on_queue_feeder_error = _send_the_error  # type: ignore[attr-defined]


def _send_the_error(queue: Any, error: Exception, sent: Any) -> None:
    where = "while a DataLoader worker sent a batch"
    if not isinstance(sent, tuple) or not isinstance(sent[0], int):  # a queue of the user's own
        _told_by_default(error, sent)
        return
    if isinstance(sent[1], ExceptionWrapper):
        where, error = sent[1].where, RuntimeError(sent[1].exc_msg)
    # Its own class may be what cannot be sent.
    told = RuntimeError, error, error.__traceback__
    instead = ExceptionWrapper(told, where)  # type: ignore[no-untyped-call]
    queue.put((sent[0], instead))
