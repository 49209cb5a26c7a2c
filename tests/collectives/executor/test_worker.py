from __future__ import annotations

import threading
import time

import pytest
import torch

from evener.collectives.executor.worker import Worker


def test_tasks_are_run_in_order_and_done_when_it_is_closed() -> None:
    worker, seen = Worker("a worker"), []
    futures = [worker.submit(lambda i=i: (seen.append(i), torch.tensor(i))[1]) for i in range(5)]
    worker.close()
    worker.close()
    assert seen == [0, 1, 2, 3, 4]
    assert [int(future.value()) for future in futures] == seen


def test_a_task_that_never_ends_is_left_behind_with_a_word() -> None:
    gate = threading.Event()

    def stuck() -> torch.Tensor:
        gate.wait()
        return torch.zeros(1)

    worker = Worker("all-reduce ring", close_seconds=0.1)
    worker.submit(stuck)
    began = time.monotonic()
    with pytest.warns(
        RuntimeWarning, match=r"'all-reduce ring' has not ended within 0\.1 s and is left behind"
    ):
        worker.close()
    assert time.monotonic() - began < 5
    gate.set()
