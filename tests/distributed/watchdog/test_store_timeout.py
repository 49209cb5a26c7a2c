from __future__ import annotations

import threading
import time

import pytest

from evener.distributed.watchdog.store_timeout import Limited


def test_an_answer_and_an_error_come_back() -> None:
    limited = Limited(5.0)
    assert limited.call(lambda: 3) == 3
    with pytest.raises(KeyError, match="x"):
        limited.call(lambda: {}["x"])
    assert limited.call(lambda: threading.current_thread().name) == "evener-store"
    limited.close()


def test_a_request_without_an_answer_is_left_behind_until_it_is_over() -> None:
    limited, gate = Limited(0.2), threading.Event()
    began = time.monotonic()
    for request in (gate.wait, lambda: 1):
        with pytest.raises(TimeoutError):
            limited.call(request)
    assert time.monotonic() - began < 5
    gate.set()
    assert limited.call(lambda: 2) == 2
    limited.close()
