"""A store with a timeout for each request.

The store is hosted by a process, the launcher or rank 0. While that process is stopped, a request blocks its thread in
native code indefinitely. So a separate thread makes the requests, and is left behind if no answer comes::

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
    """Makes requests in a separate thread, one after the other.

    Args:
        limit_seconds: Timeout for the answer to a request, and for the end of the request before it.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._free = threading.Lock()
        self._requests: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, request: Callable[[], R]) -> R:
        """Calls ``request`` in the thread, and returns its result or raises its exception.

        Raises:
            TimeoutError: If there is no answer in time.
        """
        if not self._free.acquire(timeout=self._limit_seconds):
            raise TimeoutError("an earlier request has not been answered yet")
        self._start()
        answer: Future[R] = Future()
        self._requests.put((request, answer))
        return answer.result(self._limit_seconds)

    def close(self) -> None:
        """Makes the thread end after its last request is answered."""
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
    """The methods of a store that the watchdog needs, with a timeout for each request."""

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
