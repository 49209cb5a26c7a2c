from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.collectives.tuning.cost import Link
from evener.distributed.launch.launch import launch
from evener.errors import ConfigurationError, DataError
from evener.tools.bench import (
    BenchResult,
    _bench_on_rank,
    bench_all_reduce,
    parse_sizes,
    read_topology,
    simulate_all_reduce,
)
from evener.training.reporting.chart import size_text
from tests.collectives.tuning import formulas

FAST = {"microseconds": 3, "gigabytes_per_second": 200}
SLOW = {"microseconds": 20, "gigabytes_per_second": 25}


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4096", [4096]),
        ("4K,1M,25m", [4096, 1 << 20, 25 << 20]),
        ("1G", [1 << 30]),
        ("4K:16K", [4096, 8192, 16384]),
        ("4K:20K:4", [4096, 16384]),
        ("4K:4K", [4096]),
    ],
)
def test_sizes(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@given(st.integers(1, 1 << 40))
def test_a_size_is_read_as_it_is_written(nbytes: int) -> None:
    assert parse_sizes(size_text(nbytes)) == [nbytes]


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-4K", "4.5K", "4K,", "8K:4K", "4K:8K:1", "4K:8K:x", "4K:8K:", "1:2:3:4", "4T", "K"],
)
def test_what_is_no_size_is_shown(text: str) -> None:
    with pytest.raises(ConfigurationError, match="size"):
        parse_sizes(text)


def written(directory: Path, description: Any) -> Path:
    path = directory / "topology.json"
    path.write_text(description if isinstance(description, str) else json.dumps(description))
    return path


def test_a_topology_lists_its_hosts(tmp_path: Path) -> None:
    description = {
        "hosts": [2, 1],
        "inside": FAST,
        "between": SLOW,
        "uplinks": 2,
        "add_gigabytes_per_second": 100,
    }
    topology, network = read_topology(written(tmp_path, description), None)
    assert topology.hosts == ((0, 1), (2,))
    assert (network.inside, network.between) == (Link(3e-6, 1e-9 / 200), Link(20e-6, 1e-9 / 25))
    assert (network.uplinks, network.gamma_seconds_per_byte) == (2, 1e-9 / 100)


def test_a_topology_may_leave_the_number_of_ranks_open(tmp_path: Path) -> None:
    topology, _ = read_topology(written(tmp_path, {"ranks_per_host": 4}), 10)
    assert [len(host) for host in topology.hosts] == [4, 4, 2]


def test_hosts_may_have_links_of_their_own(tmp_path: Path) -> None:
    description = {"hosts": [1, 1], "inside": FAST, "between": [SLOW, FAST]}
    _, network = read_topology(written(tmp_path, description), 2)
    assert network.between == (Link(20e-6, 1e-9 / 25), Link(3e-6, 1e-9 / 200))


@pytest.mark.parametrize(
    ("description", "ranks", "error", "words"),
    [
        ("{", None, DataError, "no JSON file"),
        ("[1, 2]", None, DataError, "holds a list"),
        ({"hosts": [2, 2]}, 5, ConfigurationError, "--ranks 5.*4 ranks"),
        ({}, None, ConfigurationError, "how many ranks"),
        ({"hosts": [1]}, None, ConfigurationError, "at least two ranks"),
        ({"hosts": [2, 0]}, None, ConfigurationError, "at least two ranks"),
        ({"hosts": "ab"}, None, DataError, "does not describe a topology"),
        ({"hosts": 3}, None, DataError, "does not describe a topology"),
        ({"hosts": [float("inf")]}, None, DataError, "does not describe a topology"),
        ({"hosts": [10**30]}, None, ConfigurationError, "at most 1,048,576 can be simulated"),
        ({}, 10**9, ConfigurationError, "at most 1,048,576 can be simulated"),
        ({"hosts": []}, None, ConfigurationError, "at least two ranks"),
        ({"ranks_per_host": 0}, 4, DataError, "ranks_per_host is 0"),
        ({"ranks_per_host": -1}, 4, DataError, "ranks_per_host is -1"),
        ({"hosts": [2, 2], "inside": {"microseconds": 3}}, None, DataError, "gigabytes_per_second"),
        (
            {"hosts": [2, 2], "inside": {"microseconds": 3, "gigabytes_per_second": 0}},
            None,
            DataError,
            "Zero",
        ),
        (
            {"hosts": [2, 2], "inside": {"microseconds": -3, "gigabytes_per_second": 1}},
            None,
            DataError,
            "alpha",
        ),
        ({"hosts": [2, 2], "betwen": SLOW}, None, DataError, "'betwen'; there are hosts"),
        ({"hosts": [2, 2], "between": SLOW, "uplinks": 0}, None, DataError, "uplink"),
        ({"hosts": [2, 2], "between": [SLOW]}, None, DataError, "each of 2 hosts, not 1"),
    ],
)
def test_descriptions_that_cannot_be(
    tmp_path: Path, description: Any, ranks: int | None, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        read_topology(written(tmp_path, description), ranks)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="no such file")
def test_a_topology_whose_end_is_not_known_is_refused() -> None:
    with pytest.raises(DataError, match="no regular file"):
        read_topology(Path("/proc/cpuinfo"), 4)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no file .*absent\.json"):
        read_topology(tmp_path / "absent.json", 4)


def test_simulation_agrees_with_the_closed_formula() -> None:
    result = simulate_all_reduce([1 << 20], 64, None, ["ring"])
    (row,) = result.rows
    assert result.simulated
    assert row.time == row.predicted == pytest.approx(formulas.ring(1 << 20, 64, Link(1e-5, 1e-10)))
    assert row.busbw == pytest.approx(row.algbw * 2 * 63 / 64)
    assert row.wrong is None
    assert result.wrong == 0


def test_slow_uplinks_favor_algorithms_that_cross_them_little(tmp_path: Path) -> None:
    path = written(tmp_path, {"ranks_per_host": 8, "inside": FAST, "between": SLOW})
    rows = simulate_all_reduce([1 << 16], 512, path, ["ring", "ring-tree"]).rows
    assert rows[1].time < rows[0].time / 10


def test_a_direct_exchange_of_thousands_of_ranks_is_left_out() -> None:
    names = {row.algorithm for row in simulate_all_reduce([4096], 4096, None, None).rows}
    assert "direct" not in names
    assert {"ring", "tree", "halving", "ring-tree"} <= names


def test_names_are_checked_before_ranks_are_started() -> None:
    with pytest.raises(ConfigurationError, match="no all-reduce is called 'rng'; known are native, ring"):
        bench_all_reduce([4096], ["rng"], processes=2, device="cpu")
    with pytest.raises(ConfigurationError, match="no dtype 'float31'"):
        bench_all_reduce([4096], dtype="float31", processes=2, device="cpu")
    with pytest.raises(ConfigurationError, match="no algorithm 'native'; there are ring"):
        simulate_all_reduce([4096], 4, None, ["native"])


def test_one_rank_has_nothing_to_reduce() -> None:
    with pytest.raises(ConfigurationError, match="at least two ranks"):
        bench_all_reduce([4096], processes=1, device="cpu")


def test_the_chart_has_a_line_for_each_algorithm() -> None:
    svg = simulate_all_reduce([1024, 4096], 4, None, ["ring", "tree"]).chart()
    assert svg.count("<polyline") == 2
    assert "4 ranks, simulated" in svg


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_what_cannot_be_made_here_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of its own accord; what was asked for by name is an error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bench = functools.partial(
        _bench_on_rank, [64], dtype="float32", check=True, device="cpu", timeout_seconds=60
    )
    with pytest.raises(ConfigurationError, match="runs on Linux aarch64"):
        launch(elsewhere, bench, ["shared-memory"], processes=2, device="cpu")
    found = launch(elsewhere, bench, [], processes=2, device="cpu")[0]
    assert "aarch64" in found.left_out["shared-memory"]
    assert "aarch64" in found.as_json()["left_out"]["shared-memory"]
    assert {row.algorithm for row in found.rows} == {"native", "ring", "tree"}


def elsewhere(bench: Any, names: list[str]) -> BenchResult:
    """Where memory cannot be shared, and with few all-reduces, of which short measurements are made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evener.distributed.shm.slots.platform.machine", lambda: "aarch64")
        patch.setattr(
            "evener.tools.bench._suitable", lambda session: ["native", "ring", "tree", "shared-memory"]
        )
        patch.setattr("evener.collectives.tuning.measure.SIZES", (1024,))
        return bench(names)
