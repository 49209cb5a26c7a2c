from __future__ import annotations

import threading
import time

import pytest
import torch

from evener.hardware.timers import STOPWATCHES, EventStopwatch, HostStopwatch, running, stopwatch, waiting


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


def test_forward_passes_are_added_without_waits(clock: Clock) -> None:
    with HostStopwatch(clock) as watch:
        for _ in range(2):
            clock.now += 1
            watch.begin_forward()
            clock.now += 2
            with waiting():
                clock.now += 30
            clock.now += 3
            watch.end_forward()
            with waiting():
                clock.now += 40
            clock.now += 4
        watch.mark()
        assert (watch.forward().value(), watch.seconds()) == (10, 20)
    with watch:
        assert watch.forward().value() == 0


def test_a_wait_inside_of_another_counts_once(clock: Clock) -> None:
    with HostStopwatch(clock) as watch:
        clock.now += 2
        for _ in range(2):
            with waiting():
                clock.now += 30
                for _ in range(2):
                    with waiting():
                        clock.now += 50
                clock.now += 70
        clock.now += 3
        watch.mark()
    assert watch.seconds() == 5


def test_stopwatches_end_in_any_order() -> None:
    before, first, second = running(), HostStopwatch(), HostStopwatch()
    first.__enter__()
    with second:
        first.__exit__()
        assert running() is second
    assert running() is before
    first.__exit__()
    assert running() is before


def test_a_wait_that_fails_ends(clock: Clock) -> None:
    def gone() -> None:
        with waiting():
            clock.now += 7
            raise RuntimeError("gone")

    with HostStopwatch(clock) as watch:
        with pytest.raises(RuntimeError):
            gone()
        with pytest.raises(RuntimeError), waiting():
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


def test_the_time_taken_stays_what_it_was_when_the_stopwatch_starts_anew(clock: Clock) -> None:
    with HostStopwatch(clock) as watch:
        assert watch.taken().value() == 0
        clock.now += 2
        watch.mark()
        half = watch.taken()
        clock.now += 1
        watch.mark()
    whole = watch.taken()
    with watch:
        clock.now += 7
        watch.mark()
    assert (half.value(), whole.value(), watch.taken().value()) == (2, 3, 7)


def test_the_whole_time_has_the_waiting_too(clock: Clock) -> None:
    with HostStopwatch(clock) as watch:
        clock.now += 2
        watch.mark()
        with waiting():
            clock.now += 30
        clock.now += 1
        whole = watch.whole()
        clock.now += 5
    assert (watch.seconds(), whole.value()) == (2, 33)
    with watch:
        assert watch.whole().value() == 0


def test_the_host_measures_for_the_cpu() -> None:
    assert isinstance(stopwatch(torch.device("cpu")), HostStopwatch)


def test_a_kind_of_device_is_measured_as_the_table_says(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = HostStopwatch(clock)
    monkeypatch.setitem(STOPWATCHES, "meta", lambda: own)
    assert stopwatch(torch.device("meta")) is own


class Event:
    """An event of a device that passes it when told to, or when the host waits for it."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.at, self.waited_for = clock, clock.now, False

    def synchronize(self) -> None:
        self.waited_for = True

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


@pytest.fixture
def events(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Those that a EventStopwatch records."""
    recorded: list[Event] = []

    def record() -> Event:
        recorded.append(Event(clock))
        return recorded[-1]

    monkeypatch.setattr("evener.hardware.timers.recorded_event", record)
    return recorded


def test_events_are_read_when_the_time_is_asked_for_and_pauses_after_the_mark_do_not_count(
    clock: Clock, events: list[Event]
) -> None:
    with EventStopwatch() as watch:
        assert watch.taken().value() == 0, "nothing was marked"
        clock.now += 1
        with waiting():
            clock.now += 20
            with waiting():
                clock.now += 10
        watch.begin_forward()
        clock.now += 1
        with waiting():
            clock.now += 5
        clock.now += 2
        watch.end_forward()
        watch.mark()
        taken, forward = watch.taken(), watch.forward()
        with waiting():
            clock.now += 45
    whole = watch.whole()
    with watch:
        clock.now += 9
        watch.mark()
        second = watch.taken()
    assert not any(event.waited_for for event in events), "the host waits for nothing before it asks"
    assert taken.value() == pytest.approx(4)
    assert second.value() == pytest.approx(9)
    assert whole.value() == pytest.approx(1 + 30 + 3 + 50)
    assert sum(event.waited_for for event in events) == 3
    assert forward.value() == pytest.approx(3)


@pytest.mark.gpu
def test_events_measure_the_device_and_not_the_host() -> None:
    matrix = torch.rand(2048, 2048, device="cuda")
    with stopwatch(torch.device("cuda")) as watch:
        assert isinstance(watch, EventStopwatch)
        for _ in range(20):
            matrix = matrix @ matrix
        with waiting():
            torch.cuda.synchronize()
            time.sleep(0.2)
        watch.mark()
    assert 0 < watch.seconds() < 0.2
