from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.collectives.shared_memory.all_reduce import SharedMemory
from evener.distributed.hosts import host_identity, hosts_of
from evener.distributed.shm import slots as slots_module
from evener.distributed.shm.segment import Announcement, Segment, describe, has_died
from evener.errors import ConfigurationError


def half_sum_is_rounded_once() -> None:
    """2048 + 1 is 2048 in float16, but 2048 + 1 + 1 is not: added in float32 it is 2050."""
    term = [2048.0, 1.0, 1.0][dist.get_rank()]
    for numel in (3, 300_000):
        tensor = torch.full((numel,), term, dtype=torch.float16)
        with SharedMemory(timeout_seconds=20) as all_reduce:
            all_reduce(tensor)
        assert (tensor == 2050).all()


def adds_in_the_order_of_ranks() -> None:
    torch.manual_seed(0)
    for numel in (100, 200_000):
        terms = torch.randn(4, numel) * 10 ** torch.randint(-4, 4, (4, numel))
        tensor = terms[dist.get_rank()].clone()
        with SharedMemory(timeout_seconds=20) as all_reduce:
            all_reduce(tensor)
        assert torch.equal(tensor, ((terms[0] + terms[1]) + terms[2]) + terms[3])


def broadcasts() -> None:
    with SharedMemory(timeout_seconds=20) as all_reduce:
        for source in (0, 2):
            for numel in (0, 5, 1_000_000):
                tensor = torch.full((numel,), float(dist.get_rank()))
                all_reduce.broadcast(tensor, source)
                assert (tensor == source).all()
                all_reduce(tensor)
                assert (tensor == 3 * source).all()


def refuses_different_tensors() -> str:
    with SharedMemory(timeout_seconds=20) as all_reduce, pytest.raises(ConfigurationError) as raised:
        all_reduce(torch.zeros(10 + dist.get_rank(), dtype=torch.float64))
    return str(raised.value)


def refuses_what_it_cannot_do() -> None:
    all_reduce = SharedMemory(timeout_seconds=20)
    with pytest.raises(ConfigurationError, match="float8_e4m3fn on cpu"):
        all_reduce(torch.zeros(3).to(torch.float8_e4m3fn))
    all_reduce.close()
    all_reduce.close()
    with pytest.raises(ConfigurationError, match="closed"):
        all_reduce(torch.zeros(3))


def one_rank_without_ordered_stores() -> str:
    original = slots_module.platform.machine
    if dist.get_rank() == 1:
        slots_module.platform.machine = lambda: "aarch64"
    try:
        with pytest.raises(ConfigurationError) as raised:
            SharedMemory(timeout_seconds=20)
    finally:
        slots_module.platform.machine = original
    return str(raised.value)


def open_files() -> tuple[int, int]:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with SharedMemory(timeout_seconds=20) as all_reduce:
            all_reduce(torch.ones(1_000_000))
        del all_reduce
    return before, len(os.listdir("/proc/self/fd"))


def test_half_types_are_added_in_float32(ranks: Any) -> None:
    ranks(3).run(half_sum_is_rounded_once)


def test_order_of_addition(ranks: Any) -> None:
    ranks(4).run(adds_in_the_order_of_ranks)


def test_broadcast(ranks: Any) -> None:
    ranks(3).run(broadcasts)


def test_different_tensors_are_named_on_every_rank(ranks: Any) -> None:
    for message in ranks(2).run(refuses_different_tensors):
        assert "rank 0 10 x float64, rank 1 11 x float64" in message


def test_refusals(ranks: Any) -> None:
    ranks(2).run(refuses_what_it_cannot_do)


def test_a_machine_that_reorders_stores_is_refused_on_every_rank(ranks: Any) -> None:
    for message in ranks(2).run(one_rank_without_ordered_stores):
        assert "rank 1 runs on Linux aarch64" in message


def test_memory_is_given_back(ranks: Any) -> None:
    for before, after in ranks(2).run(open_files):
        assert after <= before


def test_ranks_of_one_machine_share_a_host(ranks: Any) -> None:
    hosts = ranks(3).run(lambda: hosts_of(dist.group.WORLD))
    assert hosts == [((0, 1, 2),)] * 3


def test_another_network_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    here = host_identity()
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert host_identity() != here


def test_a_segment_of_another_process_is_not_taken_for_the_announced_one() -> None:
    segment = Segment.create(4096, rank=0)
    known = segment.owner
    opened = Segment.open(known)
    opened.counter(2)[0] = 17
    assert segment.counter(2)[0] == 17
    stranger = Announcement(0, known.pid, known.fd, known.nonce + 1, known.nbytes)
    with pytest.raises(OSError, match="not the rank"):
        Segment.open(stranger)
    segment.hide()
    with pytest.raises(OSError, match="No such file"):
        Segment.open(known)


def test_the_owner_of_a_segment_is_looked_at() -> None:
    segment = Segment.create(4096, rank=3)
    assert not has_died(segment)
    assert (
        describe(segment)
        == f"rank 3 (process {os.getpid()}) is alive but did not come: busy elsewhere, or past an error"
    )
    segment.process = None
    assert has_died(segment)
    assert describe(segment) == f"rank 3 (process {os.getpid()}) died"
