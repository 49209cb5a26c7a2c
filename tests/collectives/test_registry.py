from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.collectives import registry
from evener.collectives.executor.subgroup import subgroup
from evener.collectives.native import Native, nccl_algorithm
from evener.collectives.registry import ALL_REDUCES, make
from evener.collectives.schedules.schedule import Topology
from evener.collectives.shared_memory.multi_host import two_level
from evener.collectives.tuning import measure
from evener.distributed.hosts import destroy, hosts_of
from evener.errors import ConfigurationError
from evener.torch_internals.process_groups import groups_open


def default_name() -> str:
    with make() as all_reduce:
        return all_reduce.words


@contextmanager
def rank_1_on_another_machine() -> Iterator[None]:
    """One on which memory cannot be shared; the measurements are short."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("evener.distributed.shm.slots.platform.machine", lambda: "aarch64")
        patch.setattr(measure, "SIZES", (1024, 4096))
        patch.setattr(measure, "_BUDGET_SECONDS", 0.001)
        yield


def without_shared_memory(name: str | None, cache: str) -> tuple[str, list[float]]:
    with rank_1_on_another_machine(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache)
        with make(name, timeout_seconds=20) as all_reduce:
            tensor = torch.ones(3)
            all_reduce(tensor).wait()
            return all_reduce.words, tensor.tolist()


def two_hosts_of_which_one_cannot(name: str) -> str:
    """Rank 0 is alone on its host and needs no memory; on the other host rank 1 cannot share any."""
    with rank_1_on_another_machine(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("evener.collectives.shared_memory.multi_host.hosts_of", lambda group: ((0,), (1, 2)))
        with make(name, timeout_seconds=10) as all_reduce:
            tensor = torch.ones(3)
            all_reduce(tensor).wait()
            assert tensor.tolist() == [3.0] * 3
            return all_reduce.words


def one_host_has_nothing() -> str:
    """Rank 0 must not wait for leaders that never come."""

    def refused(group: dist.ProcessGroup, timeout_seconds: float) -> Native:
        raise ConfigurationError("rank 1 has none")

    inner = registry.default if dist.get_rank() == 0 else refused
    with pytest.raises(ConfigurationError) as raised:
        two_level(ALL_REDUCES["ring"], inner, timeout_seconds=10, hosts=((0,), (1, 2)))
    return str(raised.value)


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


def test_native_is_the_default_where_memory_cannot_be_shared(ranks: Any, tmp_path: Path) -> None:
    for words, summed in ranks(2).run(without_shared_memory, None, str(tmp_path)):
        assert words.startswith("native (no all-reduce through shared memory: rank 1 runs on Linux aarch64")
        assert summed == [2.0] * 3


def test_auto_goes_without_what_cannot_be_made(ranks: Any, tmp_path: Path) -> None:
    for words, summed in ranks(2).run(without_shared_memory, "auto", str(tmp_path)):
        assert words.startswith("auto: ")
        assert "(without shared-memory: no all-reduce through shared memory: rank 1 runs on Linux" in words
        assert summed == [2.0] * 3


def with_a_closed_proc(cache: str) -> str:
    """Rank 1 may not look into other processes, as in a container that is locked up."""

    def refuse(found: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("evener.distributed.shm.slots.Segment.open", refuse)
        patch.setattr(measure, "SIZES", (1024,))
        patch.setattr(measure, "_BUDGET_SECONDS", 0.001)
        patch.setenv("XDG_CACHE_HOME", cache)
        with make("auto", timeout_seconds=20) as all_reduce:
            all_reduce(torch.ones(3)).wait()
            return all_reduce.words


def test_auto_goes_without_shared_memory_where_processes_are_closed(ranks: Any, tmp_path: Path) -> None:
    for words in ranks(2).run(with_a_closed_proc, str(tmp_path)):
        assert "rank 1 cannot see the memory of rank 0 ([Errno 13] Permission denied)" in words


def test_each_host_sums_inside_as_it_can(ranks: Any) -> None:
    for words in ranks(3).run(two_hosts_of_which_one_cannot, "two-level"):
        assert words.startswith(
            "two-level (between hosts ring, inside 1 of 2 shared-memory, inside 1 of 2 native"
        )
        assert "rank 1 runs on Linux aarch64" in words


def test_two_level_is_refused_on_all_hosts_alike(ranks: Any) -> None:
    assert ranks(3).run(one_host_has_nothing) == ["rank 1 has none"] * 3


def test_an_all_reduce_that_one_rank_cannot_make_is_closed_on_the_others(ranks: Any) -> None:
    closed = []

    class Kept(Native):
        def close(self) -> None:
            closed.append(self.rank)

    def refused_on_rank_1(group: dist.ProcessGroup, timeout_seconds: float) -> Native:
        if dist.get_rank() == 1:
            raise ConfigurationError("rank 1 has none")
        return Kept(group, timeout_seconds)

    def left() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry, "find", lambda name: refused_on_rank_1)
            return *registry.make_all(["odd"], dist.group.WORLD, 20), closed

    assert ranks(2).run(left) == [({}, {"odd": "rank 1 has none"}, [0]), ({}, {"odd": "rank 1 has none"}, [])]


def test_what_is_made_half_way_is_given_back(ranks: Any, tmp_path: Path) -> None:
    """Whether a compression refuses, measuring fails, or the leaders of the hosts get no all-reduce."""
    closed = []

    class Kept(Native):
        def close(self) -> None:
            closed.append(self.name)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("on the way")

    with_kept = {**registry.ALL_REDUCES, "native": Kept}

    def half_way(patched: Any, name: str, compression: str | None = None) -> tuple[list[str], int]:
        before = groups_open()
        closed.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path))
            patch.setattr(registry, "ALL_REDUCES", with_kept)
            patch.setattr(measure, "time_in_turn", lambda each, *_, **__: [1.0] * len(each))
            patch.setattr(*patched)
            with pytest.raises(RuntimeError, match="on the way"):
                make(name, timeout_seconds=20, compression=compression)
        return list(closed), groups_open() - before

    def everywhere() -> list[tuple[list[str], int]]:
        return [
            half_way((registry, "COMPRESSIONS", {"odd": fail}), "native", "odd"),
            half_way((registry, "measured", fail), "auto"),
            half_way(("evener.collectives.tuning.measure._link", fail), "auto"),
            half_way((registry, "ALL_REDUCES", {**with_kept, "ring": fail}), "auto"),
            half_way(
                ("evener.collectives.shared_memory.multi_host.SharedFacts.from_all_reduces", fail),
                "two-level",
            ),
            half_way((registry, "SharedMemory", fail), "two-level"),
        ]

    kept = (["native"], 0)
    assert ranks(1).run(everywhere) == [[kept, kept, kept, kept, ([], 0), ([], 0)]]


@pytest.mark.parametrize("name", ["shared-memory", "ring", "two-level"])
def test_part_of_the_world(ranks: Any, name: str) -> None:
    assert ranks(4).run(over_part_of_the_world, name) == [15.0, 0.0, 15.0, 15.0]


def test_names_that_do_not_exist(ranks: Any) -> None:
    def unknown() -> None:
        with pytest.raises(
            ConfigurationError, match="no all-reduce is called 'rign'; known are native, ring"
        ):
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


def one_that_names_no_time_limit(group: dist.ProcessGroup) -> Native:
    return Native(group)


def one_that_wants_more(group: dist.ProcessGroup, color: str) -> Native:
    raise AssertionError("never called")


def one_that_is_none(group: dist.ProcessGroup) -> str:
    return "native"


def test_how_one_of_the_users_own_is_called(ranks: Any) -> None:
    def called() -> tuple[str, list[str]]:
        messages = []
        for name in ("one_that_wants_more", "one_that_is_none"):
            with pytest.raises(ConfigurationError) as raised:
                make(f"{__name__}:{name}")
            messages.append(str(raised.value))
        with make(f"{__name__}:one_that_names_no_time_limit") as all_reduce:
            return all_reduce.name, messages

    for name, (wants_more, is_none) in ranks(2).run(called):
        assert name == "native"
        assert "it needs 'color'; what it may name is group, timeout_seconds" in wants_more
        assert "one_that_is_none' returned a str" in is_none


def test_names_of_nothing_to_call() -> None:
    for name, words in (
        ("json:nothing", "module json has no nothing"),
        ("nowhere:make", "there is no module 'nowhere'"),
        ("json:", "no all-reduce is called 'json:'"),
        (":make", "no all-reduce is called"),
        ("json:__name__", "of type str, not a function or class"),
    ):
        with pytest.raises(ConfigurationError, match=words):
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
