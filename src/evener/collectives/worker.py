"""A thread that carries out all-reduces one after the other, while the caller goes on.

Backward runs in C++ and leaves Python's lock alone for most of its time, so a thread of Python beside it gets on with
the messages of one bucket while the next is being computed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from torch import Tensor
from torch.futures import Future

_Task = tuple[Callable[[], Tensor], "Future[Tensor]"]


class Worker:
    """Runs what is submitted in order; its thread starts with the first task and ends with ``close``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], Tensor]) -> Future[Tensor]:
        """A future of what ``task`` returns, or of the exception that it raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        future: Future[Tensor] = Future()
        self._tasks.put((task, future))
        return future

    def close(self) -> None:
        """Ends the thread when it has done what was submitted."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None

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
