"""Private names of the worker processes of a DataLoader.

- ``_workers`` of a DataLoader's iterator are its processes, and ``_workers_status`` tells which of them still have
  work. torch looks itself only while it waits in vain, and then only at the end of a time limit, if there is one.
- ``_utils.signal_handling`` installs a handler of SIGCHLD that raises the death of a worker wherever the main thread
  is. It is known by the module that made it; there is no setting that leaves it out.
- ``Process._popen`` is what :mod:`multiprocessing` ends at the exit of the interpreter, by SIGTERM. There is no public
  way to end workers that leave SIGTERM to their parent.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data._utils import signal_handling

__all__ = ["end_by_kill", "is_torchs_handler", "lost_workers", "worker_processes"]


def worker_processes(iterator: Any) -> list[BaseProcess]:
    """Returns the worker processes of a DataLoader's iterator; of any other iterator an empty list."""
    return list(getattr(iterator, "_workers", ()))


def lost_workers(iterator: Any) -> list[BaseProcess]:
    """Returns the worker processes that have ended although they have work."""
    status = getattr(iterator, "_workers_status", ())
    return [
        worker
        for worker, has_work in zip(worker_processes(iterator), status, strict=False)
        if has_work and not worker.is_alive()
    ]


def end_by_kill(iterator: Any) -> None:
    """Makes torch and Python end the workers by SIGKILL where they would send SIGTERM."""
    for worker in worker_processes(iterator):
        worker.terminate = worker.kill  # type: ignore[method-assign]
        worker._popen.terminate = worker._popen.kill  # type: ignore[attr-defined]


def is_torchs_handler(handler: object) -> bool:
    """Returns True for the handler of SIGCHLD that raises the death of a worker."""
    return getattr(handler, "__module__", None) == signal_handling.__name__
