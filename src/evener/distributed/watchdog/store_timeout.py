"""A store each of whose requests has a limit.

The store of a run lives in a process, the launcher's or rank 0's. While that is stopped, a request waits for good, in
native code, and with it the thread that asks. So another thread asks, and is left behind where no answer comes::

    watchdog ── request ──▶ thread ──▶ store
             ◀─ answer, or TimeoutError after `limit_seconds`; the next one as long as the thread is not back
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from torch.distributed import Store

R = TypeVar("R")


class Limited:
    """Makes requests in a thread of its own, one after the other.

    Args:
        limit_seconds: For the answer to a request, and for the one before to come back.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._free = threading.Lock()
        self._requests: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, request: Callable[[], R]) -> R:
        """What ``request`` returns or raises.

        Raises:
            TimeoutError: There is no answer in time.
        """
        if not self._free.acquire(timeout=self._limit_seconds):
            raise TimeoutError("an earlier request has not been answered yet")
        self._start()
        answer: Future[R] = Future()
        self._requests.put((request, answer))
        return answer.result(self._limit_seconds)

    def close(self) -> None:
        """Ends the thread, when its last request is answered."""
        self._requests.put(None)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="evener-store", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while (item := self._requests.get()) is not None:
            request, answer = item
            try:
                answer.set_result(request())
            except BaseException as error:
                answer.set_exception(error)
            del item, request, answer
            self._free.release()


class LimitedStore:
    """What the watchdog needs of a store."""

    def __init__(self, store: Store, limited: Limited) -> None:
        self._store, self._limited = store, limited

    def set(self, key: str, value: str) -> None:
        self._limited.call(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._limited.call(lambda: self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        return self._limited.call(lambda: self._store.check(keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._limited.call(lambda: self._store.multi_get(keys))
