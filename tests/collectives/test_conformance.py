"""Evener's own all-reduces pass the public battery, each entry of the registry without a line of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.collectives.base import AllReduce
from evener.collectives.native import Native
from evener.collectives.registry import ALL_REDUCES, COMPRESSIONS, default, make
from evener.collectives.shared_memory import multi_host as two_level_module
from evener.collectives.shared_memory.all_reduce import SharedMemory
from evener.collectives.shared_memory.multi_host import MakeAllReduce, TwoLevel, two_level
from evener.collectives.tuning.auto import Fastest
from evener.testing import check_all_reduce
from tests.collectives.tuning.test_auto import COSTS
from tests.tiers import ALWAYS, NIGHTLY, SLOW, spread

NAMES = [name for name in ALL_REDUCES if name != "auto"]
OWN_WAYS = ("native", "ring", "shared-memory", "two-level")
"""To sum and to wait for a rank; other schedules of messages are carried out as the ring is."""
OF_GLOO = [torch.int64, torch.bfloat16, torch.float32]


def claimed(name: str) -> dict[str, Any]:
    return {"dtypes": OF_GLOO} if name == "native" else {}


def hosts_of_unequal_size(group: dist.ProcessGroup, timeout_seconds: float) -> TwoLevel:
    """Rank 0 alone and the others together, as no test machine has them."""
    others = tuple(range(1, dist.get_world_size(group)))
    hosts = ((0,), others) if others else ((0,),)
    return two_level(ALL_REDUCES["ring"], default, group, timeout_seconds, hosts)


def hosts_that_differ(first: MakeAllReduce, second: MakeAllReduce) -> MakeAllReduce:
    """A host of two ranks that add up by ``first``, and one of the others, by ``second``."""

    def make_them(group: dist.ProcessGroup, timeout_seconds: float) -> TwoLevel:
        others = tuple(range(2, dist.get_world_size(group)))
        hosts = ((0, 1), others) if others else (tuple(range(dist.get_world_size(group))),)
        inner = first if dist.get_rank(group) < 2 else second
        return two_level(ALL_REDUCES["ring"], inner, group, timeout_seconds, hosts)

    return make_them


def one_host_on_a_device(group: dist.ProcessGroup, timeout_seconds: float) -> TwoLevel:
    """The tensors of the second host count as those of a device, which its leader copies to host memory and back."""
    if dist.get_rank() > 0:
        two_level_module._in_host_memory = lambda tensor: False
    return hosts_of_unequal_size(group, timeout_seconds)


def chosen_by_size(group: dist.ProcessGroup, timeout_seconds: float) -> Fastest:
    both = {"native": Native(group, timeout_seconds), "shared-memory": SharedMemory(group, timeout_seconds)}
    return Fastest(both, COSTS, group, timeout_seconds)


@pytest.mark.parametrize("world_size", spread([3, 4], ALWAYS, NIGHTLY))
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=ALWAYS if name in OWN_WAYS else NIGHTLY) for name in NAMES]
)
def test_every_all_reduce_keeps_its_promises(ranks: Any, name: str, world_size: int) -> None:
    ranks(world_size).run(check_all_reduce, name, timeout_seconds=20, missing_rank=False, **claimed(name))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW if name in OWN_WAYS else NIGHTLY) for name in NAMES]
)
def test_every_all_reduce_misses_a_rank(ranks: Any, name: str) -> None:
    """What it sums, of each type, is tried above."""
    ranks(2).run(check_all_reduce, name, dtypes=[torch.float32], timeout_seconds=20)


def test_two_level_over_hosts_of_unequal_size(ranks: Any) -> None:
    ranks(3).run(check_all_reduce, hosts_of_unequal_size, timeout_seconds=20, missing_rank=False)


@pytest.mark.nightly
def test_hosts_that_differ_inside(ranks: Any) -> None:
    makes = hosts_that_differ(SharedMemory, ALL_REDUCES["ring"])
    ranks(4).run(check_all_reduce, makes, timeout_seconds=20, missing_rank=False)


def test_hosts_of_unequal_size_that_differ_inside(ranks: Any) -> None:
    """Of two ranks on gloo's own all-reduce, and of one."""
    makes = hosts_that_differ(Native, SharedMemory)
    ranks(3).run(check_all_reduce, makes, dtypes=[torch.float32], timeout_seconds=20, missing_rank=False)


def staged() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_level_module, "_in_host_memory", two_level_module._in_host_memory)  # put back
        check_all_reduce(one_host_on_a_device, dtypes=[torch.float32], timeout_seconds=20, missing_rank=False)


def test_a_leader_moves_its_sum_through_host_memory(ranks: Any) -> None:
    """A stand-in: CPU tensors that count as those of a device."""
    ranks(3).run(staged)


def test_a_choice_by_size(ranks: Any) -> None:
    ranks(2).run(check_all_reduce, chosen_by_size, dtypes=OF_GLOO, timeout_seconds=20, missing_rank=False)


@pytest.mark.parametrize("compression", spread(COMPRESSIONS, ALWAYS, NIGHTLY, ALWAYS, NIGHTLY, ALWAYS))
def test_compression(ranks: Any, compression: str) -> None:
    def compressed(group: dist.ProcessGroup, timeout_seconds: float) -> AllReduce:
        return make("shared-memory", group, timeout_seconds, compression)

    ranks(3).run(check_all_reduce, compressed, timeout_seconds=20, missing_rank=False)


def several_parts() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_level_module, "PART_NBYTES", 32 * 1024)  # the buffers are of 130 KB and more
        check_all_reduce(
            hosts_of_unequal_size, dtypes=[torch.float32], timeout_seconds=20, missing_rank=False
        )


@pytest.mark.slow
def test_two_level_takes_a_buffer_in_parts(ranks: Any) -> None:
    ranks(3).run(several_parts)
