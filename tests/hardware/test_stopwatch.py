from __future__ import annotations

import threading
import time

import pytest
import torch

from evener.hardware.stopwatch import CudaStopwatch, HostStopwatch, stopwatch, waiting


class Clock:
    """Goes forward only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_waiting_does_not_count_and_the_last_mark_does(clock: Clock) -> None:
    with HostStopwatch(clock) as watch:
        assert watch.seconds() == 0
        clock.now += 2
        with waiting():
            clock.now += 30
        clock.now += 3
        watch.mark()
        assert watch.seconds() == 5
        with waiting():
            clock.now += 40
        assert watch.seconds() == 5
        clock.now += 1
        watch.mark()
    assert watch.seconds() == 6
    with watch:
        assert watch.seconds() == 0


def test_a_wait_that_fails_ends(clock: Clock) -> None:
    def gone() -> None:
        with waiting():
            clock.now += 7
            raise RuntimeError("gone")

    with HostStopwatch(clock) as watch:
        with pytest.raises(RuntimeError):
            gone()
        clock.now += 1
        watch.mark()
    assert watch.seconds() == 1


def test_of_nested_stopwatches_the_inner_runs(clock: Clock) -> None:
    with HostStopwatch(clock) as outer:
        with HostStopwatch(clock) as inner:
            with waiting():
                clock.now += 2
            inner.mark()
        with waiting():
            clock.now += 10
        outer.mark()
    assert (inner.seconds(), outer.seconds()) == (0, 2)
    with waiting():  # nothing runs
        clock.now += 5
    assert outer.seconds() == 2


def test_waiting_counts_on_any_thread(clock: Clock) -> None:
    """Autograd calls hooks and collectives on threads of its own."""

    def wait() -> None:
        with waiting():
            clock.now += 4

    with HostStopwatch(clock) as watch:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        clock.now += 1
        watch.mark()
    assert watch.seconds() == 1


def test_the_host_measures_for_the_cpu() -> None:
    assert isinstance(stopwatch(torch.device("cpu")), HostStopwatch)


@pytest.mark.gpu
def test_events_measure_the_device_and_not_the_host() -> None:
    matrix = torch.rand(2048, 2048, device="cuda")
    with stopwatch(torch.device("cuda")) as watch:
        assert isinstance(watch, CudaStopwatch)
        for _ in range(20):
            matrix = matrix @ matrix
        with waiting():
            torch.cuda.synchronize()
            time.sleep(0.2)
        watch.mark()
    assert 0 < watch.seconds() < 0.2
