from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evener.collectives.base import AllReduce, Done, Key, Work
from evener.collectives.native import Native
from evener.collectives.registry import make
from evener.collectives.schedules.schedule import Topology
from evener.collectives.shared_memory.all_reduce import SharedMemory
from evener.collectives.tuning import auto as auto_module
from evener.collectives.tuning import measure as measure_module
from evener.collectives.tuning.auto import Fastest
from evener.collectives.tuning.bench import Row, bench, bus_factor, table
from evener.collectives.tuning.cost import Link
from evener.collectives.tuning.measure import load, measured_costs, playoff, save
from evener.collectives.tuning.select import MeasuredCosts, TimingSample
from evener.collectives.tuning.simulate import Network

COSTS = MeasuredCosts(
    Topology.flat(2),
    Network(Link(1e-5, 1e-9), Link(1e-5, 1e-9)),
    (
        TimingSample("native", 1000, 1e-3),
        TimingSample("native", 100_000, 1e-3),
        TimingSample("shared-memory", 1000, 1e-5),
        TimingSample("shared-memory", 100_000, 1e-1),
    ),
)


def both() -> dict[str, AllReduce]:
    return {"native": Native(), "shared-memory": SharedMemory(timeout_seconds=20)}


def chosen_by_size() -> list[str]:
    with Fastest(both(), COSTS) as auto:
        tensor = torch.ones(10)
        auto(tensor).wait()
        assert tensor.tolist() == [2.0] * 10
        assert auto.exact
        return [auto.fastest_for(nbytes).name for nbytes in (0, 1000, 100_000, 10**9)]


def measured_twice(cache: str) -> list[MeasuredCosts]:
    """The first time measures and the second reads; a third meets a broken file and measures again."""
    import os

    os.environ["XDG_CACHE_HOME"] = cache
    sizes, measure_module.SIZES = measure_module.SIZES, (1024, 4096)
    budget, measure_module._BUDGET_SECONDS = measure_module._BUDGET_SECONDS, 0.001
    seen = []
    try:
        for turn in range(3):
            all_reduces = both()
            if turn == 2:
                dist.barrier()
                for path in Path(cache).rglob("*.json"):
                    path.write_text("{")
                dist.barrier()
            seen.append(measured_costs(all_reduces, dist.group.WORLD))
            for each in all_reduces.values():
                each.close()
    finally:
        measure_module.SIZES, measure_module._BUDGET_SECONDS = sizes, budget
        del os.environ["XDG_CACHE_HOME"]
    return seen


class OffByOne(AllReduce):
    """An all-reduce that is wrong in one element of each rank but the first."""

    name = "off-by-one"

    def start(self, tensor: torch.Tensor) -> Work:
        dist.all_reduce(tensor)
        tensor[-1] += self.rank
        return Done(tensor)


def rows() -> list[Row]:
    with make("shared-memory", timeout_seconds=20) as good:
        both = {"shared-memory": good, "off-by-one": OffByOne()}
        return bench(both, [3, 4096], dtype=torch.int64, costs=COSTS)


def test_auto_takes_what_was_fastest_at_the_size(ranks: Any) -> None:
    expected = ["shared-memory", "shared-memory", "native", "native"]
    assert ranks(2).run(chosen_by_size) == [expected] * 2


def words_of_auto() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_module, "SIZES", (512, 1024, 65536, 1 << 20, 1 << 24))
        with Fastest(both(), COSTS) as auto:
            found = [auto.words]
            assert auto.held_nbytes == auto.fastest_for(1).held_nbytes > 0  # native holds nothing
            auto.note = "without two-level: no"
            found.append(auto.words)
        slow = dataclasses.replace(COSTS, samples=COSTS.samples[:2])
        with Fastest({"native": Native()}, slow) as auto:
            return [*found, auto.words]


def test_the_record_says_what_runs_up_to_which_size(ranks: Any) -> None:
    words = "auto: shared-memory up to 1 KiB, native above"
    assert ranks(2).run(words_of_auto) == [[words, f"{words} (without two-level: no)", "auto: native"]] * 2


class Cut(Native):
    """One that keeps in how many segments it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[int] = []

    def start_in(self, tensor: torch.Tensor, segments: int, key: Key = None) -> Work:
        self.ran.append(segments)
        return super().start_in(tensor, segments, key)


def segments_by_size() -> tuple[list[int], str]:
    samples = (
        TimingSample("tree", 1024, 1e-4),
        TimingSample("tree", 65536, 1e-3),
        TimingSample("tree", 65536, 5e-4, 8),
    )
    tree = Cut()
    with Fastest({"tree": tree}, dataclasses.replace(COSTS, samples=samples)) as auto:
        for numel in (10, 10_000):
            auto(torch.ones(numel)).wait()
        return tree.ran, auto.words


def test_auto_runs_in_the_segments_that_were_fastest_and_says_so(ranks: Any) -> None:
    words = "auto: native up to 4 KiB, native in 8 segments above"
    assert ranks(1).run(segments_by_size) == [([1, 8], words)]


def ways_measured() -> list[tuple[str, int]]:
    """On hosts that are far apart, 4 of one rank each, as a rank alone plans it."""
    far = Network(Link(1e-5, 1e-9), Link(1e-4, 1e-8))
    made = {"tree": Native(), "ring": Native(), "native": Native()}
    return [(name, n) for name, n, _ in measure_module._ways(made, Topology.of_hosts([1] * 4), far, 1 << 22)]


def test_an_algorithm_that_flows_is_measured_whole_and_in_segments(ranks: Any) -> None:
    (ways,) = ranks(1).run(ways_measured)
    assert [name for name, _ in ways] == ["tree", "tree", "ring", "native"]
    assert [segments > 1 for _, segments in ways] == [False, True, False, False]


class Recorder(Native):
    """Records which calls it gets."""

    def __init__(self) -> None:
        super().__init__(dist.group.WORLD)
        self.calls: list[str] = []

    def start(self, tensor: Tensor) -> Work:
        self.calls.append("once")
        return super().start(tensor)

    def start_lasting(self, tensor: Tensor, key: Key) -> Work:
        self.calls.append("lasting")
        return super().start(tensor)


def calls_measured() -> tuple[set[str], set[str]]:
    """Calls while the costs are measured, and in a run."""
    measured, used = Recorder(), Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_module, "SIZES", (1024,))
        costs = measure_module.measure({"native": measured}, Topology.of_hosts([1, 1]), measured.group)
    Fastest({"native": used}, costs)(torch.zeros(256), lasting=True).wait()
    return set(measured.calls), set(used.calls)


def test_the_way_that_a_run_uses_is_measured(ranks: Any) -> None:
    assert ranks(2).run(calls_measured) == [({"lasting"}, {"lasting"})] * 2


def test_the_closest_run_once_more() -> None:
    """What was lucky loses; what came last does not win because the others met with a disturbance."""
    assert playoff([1.0, 1.2, 9.0], {0: 3.0, 1: 2.0}) == [3.0, 2.0, 18.0]
    assert playoff([1.0, 1.2, 9.0], {0: 0.5, 1: 2.0}) == [0.5, 2.0, 9.0]


def timed_twice() -> tuple[list[float], list[list[float]]]:
    """A first run in which the second was lucky, and a second that sees it."""
    runs = [[0.1, 0.09, 0.5], [0.11, 0.13]]
    asked = []

    def turns(ways: Any, *_: Any, **__: Any) -> list[float]:
        asked.append(list(ways))
        return runs[len(asked) - 1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_module, "time_in_turn", turns)
        times = measure_module._times([1, 2, 3], torch.zeros(1), dist.group.WORLD)  # type: ignore[list-item]
    return times, asked


def test_a_lucky_round_does_not_decide(ranks: Any) -> None:
    times, asked = ranks(1).run(timed_twice)[0]
    assert asked == [[1, 2, 3], [1, 2]]
    assert times[:2] == [0.11, 0.13]
    assert times[2] > 0.5


def test_auto_needs_to_know_something_of_each(ranks: Any) -> None:
    def unknown() -> None:
        with pytest.raises(ValueError, match="nothing is known"):
            Fastest({"mystery": Native()}, COSTS)

    ranks(2).run(unknown)


def test_measurements_are_kept_and_the_same_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    of_ranks = ranks(3).run(measured_twice, str(tmp_path))
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    first, second, third = of_ranks[0]
    assert first == second
    assert third != first
    assert {(sample.name, sample.nbytes) for sample in first.samples} == {
        (name, nbytes) for name in ("native", "shared-memory") for nbytes in (1024, 4096)
    }
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".json"]


def measured_slowly() -> list[tuple[int, float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_module, "SIZES", (1024, 4096, 16384))
        patch.setattr(measure_module, "time_in_turn", lambda each, buffer, group, **_: [buffer.nbytes / 3000])
        topology = Topology.flat(2)
        with Native() as native:
            costs = measure_module.measure({"native": native}, topology, native.group)
    return [(sample.nbytes, sample.seconds) for sample in costs.samples]


def test_on_slow_links_large_sizes_are_not_measured(ranks: Any) -> None:
    """Minutes would go by; what takes longer than a second is in proportion to its size."""
    assert ranks(2).run(measured_slowly) == [[(1024, 1024 / 3000), (4096, 4096 / 3000)]] * 2


def test_costs_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "costs.json"
    assert load(path) is None
    save(path, COSTS)
    assert load(path) == COSTS
    path.write_text(json.dumps({"topology": 3}))
    assert load(path) is None
    (tmp_path / "file").write_text("")
    save(tmp_path / "file" / "costs.json", COSTS)  # a cache that cannot be written is no error


def test_bench_counts_what_is_wrong(ranks: Any) -> None:
    good, bad, good_large, bad_large = ranks(3).run(rows)[0]
    assert (good.algorithm, good.size, good.count, good.type, good.redop) == (
        "shared-memory",
        8,
        1,
        "int64",
        "sum",
    )
    assert (bad.algorithm, bad.wrong, bad_large.wrong) == ("off-by-one", 2, 2)
    assert good.wrong == good_large.wrong == 0
    assert good_large.count == 512
    assert good.predicted == pytest.approx(1e-5)
    assert bad.predicted is None
    assert good_large.algbw == pytest.approx(4096 / good_large.time / 1e9)
    assert good_large.busbw == pytest.approx(good_large.algbw * 4 / 3)


def test_bus_factor() -> None:
    assert [bus_factor(n) for n in (1, 2, 4)] == [0, 1, 1.5]


def test_table() -> None:
    row = Row("ring", 4096, 1024, "float32", "sum", 2e-3, 2.048, 3.072, 0, None)
    assert table([row]).splitlines() == [
        "size       count     type  redop  algorithm    time   algbw   busbw  #wrong  predicted",
        " (B)  (elements)                               (us)  (GB/s)  (GB/s)               (us)",
        "4096        1024  float32    sum       ring  2000.0    2.05    3.07       0        N/A",
    ]
