from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import Dataset, get_worker_info

from evener.core.collector import collector_paused
from evener.data import worker_deaths
from evener.data.worker_deaths import _waiting_for
from evener.data.workers import Workers
from evener.errors import DataError
from evener.torch_internals.data_workers import end_by_kill


class Dies(Dataset[Any]):
    """Yields the process that has read an item; the third item ends the worker that would read it."""

    def __init__(self, end: Callable[[], object] = lambda: None) -> None:
        self._end = end

    def __getitem__(self, index: int) -> int:
        if index == 3:
            self._end()
        info = get_worker_info()
        assert info is not None
        return os.getpid()


def read(end: Callable[[], object] = lambda: None) -> Iterator[int]:
    return Workers(1, start_method="fork").read(Dies(end), iter(range(8)))


def until_gone(pid: int) -> None:
    """Waits for the end of a child, and leaves it to others to ask how it ended."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by signal SIGKILL"),
        (lambda: os._exit(0), "ended with status 0"),
        (lambda: sys.exit(3), "ended with status 3"),
    ],
    ids=["SIGKILL", "exit 0", "SystemExit"],
)
def test_a_worker_that_dies_is_told_with_how(end: Callable[[], object], how: str) -> None:
    with pytest.raises(DataError, match=rf"DataLoader worker \(pid \d+\) {how}"):
        list(read(end))


def test_a_death_is_raised_where_a_value_is_awaited_and_nowhere_else() -> None:
    values = read()
    worker = next(values)
    os.kill(worker, signal.SIGKILL)
    until_gone(worker)
    time.sleep(0)  # where Python would run a handler of SIGCHLD that is due
    with pytest.raises(DataError, match=rf"{worker}\) was killed by signal SIGKILL"):
        next(values)


def test_a_wait_in_a_thread_leaves_that_of_the_main_thread_alone() -> None:
    values, of_thread = read(), read()
    pid = next(values)  # the worker of the main thread
    began, is_over = threading.Event(), threading.Event()

    def wait() -> None:
        with _waiting_for(of_thread):
            began.set()
            is_over.wait(20)

    thread = threading.Thread(target=wait)
    with _waiting_for(values):
        thread.start()
        assert began.wait(20)
    is_over.set()
    thread.join()
    os.kill(pid, signal.SIGKILL)
    until_gone(pid)
    time.sleep(0)  # where Python would run a handler of SIGCHLD that is due
    assert worker_deaths._awaited is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_worker_goes_on_when_its_job_is_asked_to_stop(number: signal.Signals) -> None:
    values = read()
    worker = next(values)
    os.kill(worker, number)
    assert list(values) == [worker] * 7


def test_a_worker_that_ends_by_a_kill_is_freed_at_once() -> None:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    end_by_kill(SimpleNamespace(_workers=[process]))
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    reference = weakref.ref(process)
    with collector_paused():
        del process
        assert reference() is None
