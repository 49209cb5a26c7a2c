from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.distributed.watchdog import heartbeat
from evener.distributed.watchdog.heartbeat import Heartbeat, MainThread, ThreadSample, in_short


@contextmanager
def looking(main: MainThread, samples: list[ThreadSample], release: Callable[[], None]) -> Iterator[None]:
    """Looks at the main thread a few times from another one while the block runs, then releases it."""

    def look() -> None:
        for _ in range(6):
            time.sleep(0.05)
            samples.append(main.take_sample())
        release()

    thread = threading.Thread(target=look)
    thread.start()
    yield
    thread.join()


def test_nothing_is_collected_while_the_stack_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer would let the main thread go on while its frames are read."""
    collects: list[bool] = []

    def outward(frame: FrameType | None) -> Iterator[FrameType]:
        collects.append(gc.isenabled())
        yield from original(frame)
        collects.append(gc.isenabled())

    original = heartbeat._outward
    monkeypatch.setattr(heartbeat, "_outward", outward)
    assert gc.isenabled()
    MainThread().take_sample()
    assert collects == [False, False]
    assert gc.isenabled()


def test_a_heartbeat_survives_the_wire() -> None:
    beat = Heartbeat(
        1,
        "host",
        2,
        3,
        4.0,
        "forward",
        5,
        True,
        6.0,
        ("a.py:1 in f", "b.py:2 in g"),
        "x",
        "save of step 5",
        "t",
        True,
        0,
        1.5,
        "float32[3]",
        9.0,
    )
    assert Heartbeat.from_json(beat.to_json()) == beat


def test_a_place_in_words() -> None:
    beat = Heartbeat(1, "host", 2, 3, 4.0, "forward", 5, where=("a.py:1 in f", "b.py:2 in g"))
    assert beat.place == "forward of step 5, at a.py:1 in f < b.py:2 in g"
    assert Heartbeat(1, "host", 2, 3, 4.0).place == "its program"
    inside = Heartbeat(1, "host", 2, 3, 4.0, "barrier", together="checkpoint of step 5")
    assert inside.place == "barrier (during checkpoint of step 5)"
    assert Heartbeat(1, "host", 2, 3, 4.0, "checkpoint", 5, together="checkpoint of step 5").place == (
        "checkpoint of step 5"
    )


def test_a_blocked_main_thread_is_still_and_its_code_is_named() -> None:
    gate = threading.Event()
    samples: list[ThreadSample] = []
    with looking(MainThread(), samples, gate.set):
        gate.wait()
    assert samples[-1].still_seconds >= 0.1
    assert samples[-1].call is None
    assert "in test_a_blocked_main_thread_is_still_and_its_code_is_named" in samples[-1].where[0]


def test_a_main_thread_that_computes_is_not_still() -> None:
    done = threading.Event()
    samples: list[ThreadSample] = []
    with looking(MainThread(), samples, done.set):
        while not done.is_set():
            pass
    assert min(sample.still_seconds for sample in samples) == 0


def test_what_a_collective_is_given_in_short() -> None:
    assert in_short(torch.zeros(3, 4)) == "float32[3, 4]"
    assert in_short([torch.zeros(2, dtype=torch.int64)] * 3) == "3 x int64[2]"
    assert in_short(torch.zeros(())) == "float32[]"
    assert in_short([]) == in_short(None) == in_short(["x"]) == ""


def test_a_rank_that_destroys_its_groups_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL it does, and another rank may have work to do before."""
    gate, samples = threading.Event(), list[ThreadSample]()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        held = eval("lambda name: gate.wait()", {"gate": gate})  # code of a library
        with monkeypatch.context() as patched, looking(MainThread(), samples, gate.set):
            patched.setattr(dist.distributed_c10d, "_unregister_process_group", held)
            dist.destroy_process_group(group)
        assert samples[-1].still_seconds >= 0.1
        assert samples[-1].call is None
    finally:
        dist.destroy_process_group()


def late(rank: int) -> tuple[str | None, str]:
    """Of a rank whose peer is late, how its wait in a collective looks."""
    dist.barrier()
    if rank != dist.get_rank():
        time.sleep(0.8)
        dist.all_reduce(torch.zeros(3, 4))
        return None, ""
    samples: list[ThreadSample] = []
    main = MainThread()
    with looking(main, samples, lambda: None):
        dist.all_reduce(torch.zeros(3, 4))
    return samples[-1].call, samples[-1].payload


def test_a_wait_in_a_collective_shows_its_name_and_what_it_was_given(ranks: Any) -> None:
    assert ranks(2).run(late, 0)[0] == ("all_reduce", "float32[3, 4]")
