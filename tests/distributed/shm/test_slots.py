from __future__ import annotations

import random
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from evener.distributed.shm import futex
from evener.distributed.shm import slots as slots_module
from evener.distributed.shm.segment import Segment
from evener.distributed.shm.slots import ENTERED, REDUCED, Slots
from evener.distributed.shm.spin_wait import SpinWait

ROUNDS = 3000


def sleeps() -> int:
    """How many there were in many rendezvous in which nobody spins.

    Raises:
        AssertionError: For the first that nobody ended.
    """
    group = dist.group.WORLD
    assert group is not None
    slots = Slots(group, 1, 64, 20)
    chance, count = random.Random(dist.get_rank()), 0

    def sleep(word: int, seen: int, seconds: float) -> None:
        nonlocal count
        count, began = count + 1, time.monotonic()
        futex.sleep(word, seen, 5.0)
        assert time.monotonic() - began < 4.0

    quick = mock.patch.multiple(slots_module, sleep=sleep, _SPIN_SECONDS=0.0, _YIELD_SECONDS=0.0)
    with quick, mock.patch.object(slots_module, "_LOOK_SECONDS", 10.0):
        for number in range(1, ROUNDS + 1):
            sum(range(chance.randrange(300)))
            stage = (ENTERED, REDUCED)[number % 2]
            slots.publish(stage, number)
            slots.wait(stage, number)
    return count


def test_who_sleeps_is_woken(ranks: Any) -> None:
    assert min(ranks(3).run(sleeps)) > ROUNDS / 100


def seconds_of_cpu_while_rank_1_is_late(seconds: float) -> float:
    group = dist.group.WORLD
    assert group is not None
    slots = Slots(group, 1, 64, 20)
    dist.barrier()
    began = time.thread_time()
    if dist.get_rank() == 1:
        time.sleep(seconds)
    slots.publish(ENTERED, 1)
    slots.wait(ENTERED, 1)
    return time.thread_time() - began


def test_a_long_wait_takes_no_core(ranks: Any) -> None:
    waited = 1.0
    assert max(ranks(2).run(seconds_of_cpu_while_rank_1_is_late, waited)) < 0.1 * waited


def times_given_way(cores: int) -> int:
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.object(slots_module, "usable_cores", return_value=cores):
        slots = Slots(group, 1, 64, 20)
    dist.barrier()
    told = torch.ones(1)
    # Rank 1 comes when rank 0 has given way, or after a while if that is not to be.
    ways = mock.Mock(side_effect=lambda: dist.send(told, 1) if ways.call_count == 1 else None)
    with (
        mock.patch.object(slots_module, "give_way", ways),
        mock.patch.object(slots_module, "_YIELD_SECONDS", 20.0),
        mock.patch.object(slots_module, "CROWD", SpinWait()),
    ):
        if dist.get_rank() == 1:
            dist.recv(told, 0) if cores > 1 else time.sleep(0.05)
            ways.side_effect = None
        slots.publish(ENTERED, 1)
        slots.wait(ENTERED, 1)
    return ways.call_count


def test_ranks_give_way_only_where_each_may_have_a_core(ranks: Any) -> None:
    assert ranks(2).run(times_given_way, 1)[0] == 0
    assert ranks(2).run(times_given_way, 2)[0] > 0


def test_giving_way_is_left_for_a_while_where_it_took_long() -> None:
    crowd = SpinWait()
    assert crowd.may_give_way(100.0)
    crowd.gave_way(100.0, 1e-6)
    assert crowd.may_give_way(100.0)
    crowd.gave_way(100.0, 3e-3)
    assert not crowd.may_give_way(100.1)
    assert crowd.may_give_way(100.3)


def test_the_while_grows_with_every_long_one_in_a_row_and_is_forgotten_in_quiet() -> None:
    crowd, now, pauses = SpinWait(), 0.0, []
    for _ in range(10):
        crowd.gave_way(now, 3e-3)
        began = now
        while not crowd.may_give_way(now):
            now += 0.05
        pauses.append(round(now - began, 2))
    assert pauses == sorted(pauses)
    assert pauses[-1] <= 10.1
    crowd.gave_way(now + 2.0, 1e-6)
    crowd.gave_way(now + 2.0, 3e-3)
    assert crowd.may_give_way(now + 2.3)


def test_data_may_be_of_any_length() -> None:
    """As an odd number of gradients in bfloat16 is."""
    segment = Segment.create(6, rank=0)
    segment.counter(1)[0] = 7
    segment.view(torch.bfloat16, 0, 3).fill_(2)
    again = Segment.open(segment.owner)
    segment.hide()
    assert again.counter(1)[0] == 7
    assert again.view(torch.bfloat16, 0, 3).tolist() == [2, 2, 2]
