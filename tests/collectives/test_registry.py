from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.collectives import registry
from evener.collectives.algorithm import Topology
from evener.collectives.host import hosts_of
from evener.collectives.native import Native, nccl_algorithm
from evener.collectives.registry import ALL_REDUCES, make
from evener.collectives.subgroup import destroy, subgroup
from evener.errors import ConfigurationError


def default_name() -> str:
    with make() as all_reduce:
        return all_reduce.name


def default_where_memory_is_not_shared() -> str:
    def refuse(group: Any, timeout_seconds: float) -> None:
        raise ConfigurationError("no shared memory here")

    original, registry.SharedMemory = registry.SharedMemory, refuse
    try:
        return default_name()
    finally:
        registry.SharedMemory = original


def over_part_of_the_world(name: str) -> float:
    """Ranks 0, 2 and 3 of four, again and again: what is closed may be made again."""
    group = subgroup(dist.group.WORLD, [0, 2, 3], 20) if dist.get_rank() != 1 else None
    if dist.get_rank() == 1:
        subgroup(dist.group.WORLD, [0, 2, 3], 20)
        return 0.0
    tensor = torch.tensor([float(dist.get_rank())])
    for _ in range(2):
        with make(name, group, 20) as all_reduce:
            all_reduce(tensor).wait()
    destroy(group)
    return tensor.item()


def test_shared_memory_is_the_default_on_one_host(ranks: Any) -> None:
    assert ranks(2).run(default_name) == ["shared-memory"] * 2


def test_native_is_the_default_where_memory_cannot_be_shared(ranks: Any) -> None:
    assert ranks(2).run(default_where_memory_is_not_shared) == ["native"] * 2


@pytest.mark.parametrize("name", ["shared-memory", "ring", "two-level"])
def test_part_of_the_world(ranks: Any, name: str) -> None:
    assert ranks(4).run(over_part_of_the_world, name) == [15.0, 0.0, 15.0, 15.0]


def test_names_that_do_not_exist(ranks: Any) -> None:
    def unknown() -> None:
        with pytest.raises(ConfigurationError, match="no all-reduce 'rign'; there are native, ring"):
            make("rign")
        with pytest.raises(ConfigurationError, match="no compression 'zip'; there are fp16"):
            make("ring", compression="zip")

    ranks(2).run(unknown)


def test_every_name_names_its_all_reduce(ranks: Any) -> None:
    def names() -> list[str]:
        made = []
        for name in ALL_REDUCES:
            if name != "auto":
                with make(name) as all_reduce:
                    made.append(all_reduce.name)
        return made

    assert ranks(2).run(names)[0] == [name for name in ALL_REDUCES if name != "auto"]


def native_of_our_own(group: dist.ProcessGroup, timeout_seconds: float) -> Native:
    made = Native(group, timeout_seconds)
    made.name = "our own"
    return made


def test_what_flows_through_a_tree_between_hosts_is_cut() -> None:
    """In proportion to the ranks of a host, each of which has a part of it."""
    flat, wide = Topology.flat(8), Topology.of_hosts([4, 1])
    assert registry.tree_segment_nbytes(wide) == 4 * registry.tree_segment_nbytes(Topology.of_hosts([1, 1]))
    assert registry.tree_segment_nbytes(wide) < registry.tree_segment_nbytes(flat)


def test_an_all_reduce_of_the_users_own(ranks: Any) -> None:
    def own() -> str:
        with make(f"{__name__}:native_of_our_own") as all_reduce:
            return all_reduce.name

    assert ranks(2).run(own) == ["our own"] * 2


@pytest.mark.parametrize("name", ["json:nothing", "nowhere:make", "json:", ":make", "json:__name__"])
def test_names_of_nothing_to_call(name: str) -> None:
    with pytest.raises(ConfigurationError, match="there is no all-reduce"):
        registry.find(name)


def test_nccl_algorithm_holds_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("NCCL_ALGO", "Ring")
    with nccl_algorithm("tree"):
        assert os.environ["NCCL_ALGO"] == "Tree"
    assert os.environ["NCCL_ALGO"] == "Ring"
    monkeypatch.delenv("NCCL_ALGO")
    with nccl_algorithm("NVLS"):
        assert os.environ["NCCL_ALGO"] == "NVLS"
    assert "NCCL_ALGO" not in os.environ
    with pytest.raises(ConfigurationError, match="no all-reduce 'PAT'"), nccl_algorithm("PAT"):
        pass


def test_hosts_are_asked_of_the_ranks(ranks: Any) -> None:
    def with_a_stranger() -> tuple[tuple[int, ...], ...]:
        import socket

        original = socket.gethostname
        socket.gethostname = lambda: "a" if dist.get_rank() in (0, 2) else "b"
        try:
            return hosts_of(dist.group.WORLD)
        finally:
            socket.gethostname = original

    assert ranks(3).run(with_a_stranger) == [((0, 2), (1,))] * 3
