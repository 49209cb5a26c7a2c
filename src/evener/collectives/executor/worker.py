"""A thread that runs all-reduces one after the other, while the caller goes on.

Backward runs in C++ and does not hold Python's global lock most of the time. So a Python thread can send the messages
of one bucket while backward computes the next.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable

from torch import Tensor
from torch.futures import Future

CLOSE_SECONDS = 5.0
"""How long ``close`` waits for submitted tasks. A task that is still not done waits for a rank that is gone."""

_Task = tuple[Callable[[], Tensor], "Future[Tensor]"]


class Worker:
    """Runs submitted tasks in order. The thread starts with the first task and ends with ``close``.

    Args:
        name: The name of the thread.
        close_seconds: How long ``close`` waits for the thread.
    """

    def __init__(self, name: str, close_seconds: float = CLOSE_SECONDS) -> None:
        self._name = name
        self._close_seconds = close_seconds
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], Tensor]) -> Future[Tensor]:
        """Queues ``task``. Returns a future of its result, or of the exception that it raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        future: Future[Tensor] = Future()
        self._tasks.put((task, future))
        return future

    def close(self) -> None:
        """Ends the thread after it has finished the submitted tasks.

        A thread that still waits for another rank after ``close_seconds`` is left running, with a warning. It does not
        keep the process alive.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._tasks.put(None)
        thread.join(self._close_seconds)
        if thread.is_alive():
            warnings.warn(
                f"the thread {self._name!r} has not ended within {self._close_seconds:g} s and is left behind: it "
                "waits for another rank, which is gone or elsewhere",
                RuntimeWarning,
                stacklevel=2,
            )

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, future = item
            try:
                result = task()
            except BaseException as error:
                future.set_exception(error)  # type: ignore[arg-type]  # torch's hint leaves out BaseException
            else:
                future.set_result(result)
            del item, task, future
