"""A thread that carries out all-reduces one after the other, while the caller goes on.

Backward runs in C++ and leaves Python's lock alone for most of its time, so a thread of Python beside it gets on with
the messages of one bucket while the next is being computed.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable

from torch import Tensor
from torch.futures import Future

CLOSE_SECONDS = 5.0
"""How long closing waits for what was submitted. What is left then waits for a rank that is gone."""

_Task = tuple[Callable[[], Tensor], "Future[Tensor]"]


class Worker:
    """Runs what is submitted in order; its thread starts with the first task and ends with ``close``.

    Args:
        name: Of the thread.
        close_seconds: How long `close` waits for the thread.
    """

    def __init__(self, name: str, close_seconds: float = CLOSE_SECONDS) -> None:
        self._name = name
        self._close_seconds = close_seconds
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
        """Ends the thread when it has done what was submitted.

        One that still waits for another rank after ``close_seconds`` is left to itself, with a warning: it does not
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
