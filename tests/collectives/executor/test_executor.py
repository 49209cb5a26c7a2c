from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.collectives.executor.executor import Scheduled
from evener.collectives.schedules.algorithms import ALGORITHMS
from evener.collectives.schedules.schedule import Topology
from evener.errors import RankError, RankTimeoutError


def many_segments(name: str) -> None:
    """More segments than may be in flight, the last one short, over hosts of unequal size."""
    topology = Topology.of_hosts([1, 2])
    with Scheduled(name, ALGORITHMS[name], None, 20, topology, segment_nbytes=1024) as all_reduce:
        for numel in (256 * 7, 256 * 7 + 5):
            tensor = torch.arange(numel, dtype=torch.float32) + dist.get_rank()
            all_reduce(tensor).wait()
            assert torch.equal(tensor, 3 * torch.arange(numel, dtype=torch.float32) + 3)
            tensor = torch.arange(numel, dtype=torch.float32) + dist.get_rank()
            all_reduce.start_in(tensor, 3).wait()
            assert torch.equal(tensor, 3 * torch.arange(numel, dtype=torch.float32) + 3)


def a_rank_that_does_not_call() -> list[str]:
    errors = []
    with Scheduled("ring", ALGORITHMS["ring"], None, 0.5) as all_reduce:
        if dist.get_rank() != 2:
            for _ in range(2):
                with pytest.raises((RankTimeoutError, RankError)) as raised:
                    all_reduce(torch.ones(10)).wait()
                errors.append(str(raised.value))
    dist.barrier()
    return errors


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_many_segments(ranks: Any, name: str) -> None:
    ranks(3).run(many_segments, name)


def test_a_rank_that_does_not_call_is_named_and_the_all_reduce_is_done_for(ranks: Any) -> None:
    first, second, absent = ranks(3).run(a_rank_that_does_not_call)
    assert absent == []
    for errors in (first, second):
        assert "without rank 2:" in errors[0] or "broke off: rank 2;" in errors[0]
        assert errors[1] == errors[0]
