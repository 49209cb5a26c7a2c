from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from evener.errors import RankTimeoutError, TaskError
from evener.hardware.timers import HostStopwatch
from evener.strategies.single_process.devices import parse_devices
from evener.strategies.single_process.parallel_apply import (
    DeviceThreads,
    PeerThreadError,
    ReplicaThreads,
    ThreadBarrier,
)

DEVICES = parse_devices(["cpu:0", "cpu:1", "cpu:2"])


@pytest.fixture
def crew() -> Iterator[DeviceThreads]:
    made = DeviceThreads(DEVICES)
    yield made
    made.close()
    made.close()


def nothing() -> None:
    pass


def test_every_device_has_a_thread_and_its_part_of_the_cores(crew: DeviceThreads) -> None:
    def who() -> tuple[str, int, bool]:
        return threading.current_thread().name, torch.get_num_threads(), torch.is_grad_enabled()

    before = torch.get_num_threads()
    with torch.no_grad():
        found = crew.run(dict.fromkeys(range(3), who), nothing)
    assert [name.rpartition("_")[0] for name, _, _ in found.values()] == [
        f"evener {device}" for device in DEVICES
    ]
    assert {threads for _, threads, _ in found.values()} == {max(1, before // 3)}
    assert {grad for _, _, grad in found.values()} == {False}
    assert torch.get_num_threads() == before
    assert crew.run({1: who}, nothing)[1][2] is True


def test_threads_end_with_the_crew() -> None:
    before = threading.active_count()
    made = DeviceThreads(DEVICES)
    assert threading.active_count() == before + 3
    made.close()
    assert threading.active_count() == before


def test_backward_stays_on_the_thread(crew: DeviceThreads) -> None:
    def job() -> bool:
        seen: list[int] = []
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda gradient: seen.append(threading.get_ident()))
        x.sum().backward()
        return seen == [threading.get_ident()]

    assert all(crew.run(dict.fromkeys(range(3), job), nothing).values())


def test_an_error_ends_the_waits_of_the_others_and_names_its_device(crew: DeviceThreads) -> None:
    meeting, ended = ThreadBarrier(3, 60.0), []

    def fail() -> None:
        raise KeyError("here")

    def wait(place: int) -> Callable[[], None]:
        def job() -> None:
            try:
                meeting.bring(place, None)()
            finally:
                ended.append(place)

        return job

    with pytest.raises(KeyError, match="here") as caught:
        crew.run({0: wait(0), 1: wait(1), 2: fail}, meeting.drop)
    assert sorted(ended) == [0, 1]
    assert caught.value.__notes__ == ["on device cpu:2, one of 3 of this process"]


def test_an_interrupt_ends_the_waits_too(crew: DeviceThreads) -> None:
    meeting = ThreadBarrier(2, 60.0)

    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        crew.run({0: lambda: meeting.bring(0, None)(), 1: interrupt}, meeting.drop)
    assert crew.run({0: lambda: 7}, nothing) == {0: 7}


def test_what_fails_meanwhile_is_raised(crew: DeviceThreads) -> None:
    def meanwhile() -> None:
        raise ZeroDivisionError

    meeting = ThreadBarrier(2, 60.0)
    with pytest.raises(ZeroDivisionError):
        crew.run({0: lambda: meeting.bring(0, None)()}, meeting.drop, meanwhile)


def test_a_meeting_goes_on_for_any_number_of_turns(crew: DeviceThreads) -> None:
    meeting = ThreadBarrier(3, 60.0)

    def job(place: int) -> Callable[[], list[list[int]]]:
        def turns() -> list[list[int]]:
            found = []
            for turn in range(50):
                time.sleep(0.0001 * (turn % (place + 2)))
                found.append(meeting.bring(place, 10 * turn + place)())
            return found

        return turns

    found = crew.run({place: job(place) for place in range(3)}, meeting.drop)
    assert (
        found[0] == found[1] == found[2] == [[10 * turn + place for place in range(3)] for turn in range(50)]
    )


def test_a_meeting_that_not_all_come_to_ends_with_a_reason() -> None:
    meeting = ThreadBarrier(2, 0.01)
    with pytest.raises(RankTimeoutError, match="not all of 2 devices came"):
        meeting.bring(0, None)()
    dropped = ThreadBarrier(2, 60.0)
    dropped.drop()
    with pytest.raises(PeerThreadError):
        dropped.bring(1, None)()


def test_peers_add_up_in_their_order_and_notice_strangers(crew: DeviceThreads) -> None:
    together, meeting = ReplicaThreads(), ThreadBarrier(2, 60.0)
    assert together.size() == 1

    def job(place: int, length: int) -> Callable[[], tuple[int, torch.Tensor, torch.Tensor]]:
        def told() -> tuple[int, torch.Tensor, torch.Tensor]:
            with HostStopwatch() as watch, together.joined(meeting, place, watch):
                own = torch.full((length,), place + 1.0)
                gathered = together.all_gather_later(own, "bn")()
                return together.size(), gathered, together.all_reduce_later(own, f"bn {length}")()

        return told

    found = crew.run({0: job(0, 2), 2: job(1, 2)}, meeting.drop)
    for size, gathered, summed in found.values():
        assert size == 2
        assert gathered.tolist() == [[1, 1], [2, 2]]
        assert summed.tolist() == [3, 3]
    with pytest.raises(
        TaskError, match=r"different layers .* bn with a message of shape \(2,\), bn with .* \(3,\)"
    ):
        crew.run({0: job(0, 2), 2: job(1, 3)}, meeting.drop)
