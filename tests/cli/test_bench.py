"""``evener bench``: what it prints and writes, and with which status it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evener.cli.main import main
from evener.collectives.tuning.bench import Row
from evener.tools import bench as benching
from evener.tools.bench import BenchResult
from tests.distributed.processes import call

FIELDS = {"algorithm", "size", "count", "type", "redop", "time", "algbw", "busbw", "wrong", "predicted"}


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def bench(*arguments: str) -> int:
    try:
        return main(["bench", *arguments])
    except SystemExit as end:  # argparse
        return int(end.code or 0)


def row(**changes: Any) -> Row:
    values = {
        "algorithm": "ring",
        "size": 4096,
        "count": 1024,
        "type": "float32",
        "redop": "sum",
        "time": 1e-3,
        "algbw": 4e-3,
        "busbw": 4e-3,
        "wrong": 0,
        "predicted": None,
    }
    return Row(**(values | changes))


@pytest.mark.slow
def test_two_ranks_and_two_sizes(capfd: pytest.CaptureFixture[str]) -> None:
    status = call(
        bench,
        *("--processes", "2", "--device", "cpu", "--sizes", "4K,64K", "--type", "int32"),
        *("--algorithms", "native,shared-memory", "--json", "found.json", "--plot", "found.svg"),
    )
    assert status == 0
    title, header, *lines = capfd.readouterr().out.splitlines()
    assert title == "# 2 ranks, measured"
    assert header.split()[-5:] == ["time", "algbw", "busbw", "#wrong", "predicted"]
    assert len(lines) == 1 + 4
    found = json.loads(Path("found.json").read_text())
    assert (found["ranks"], found["simulated"]) == (2, False)
    assert [(r["algorithm"], r["size"]) for r in found["rows"]] == [
        (name, size) for size in (4096, 65536) for name in ("native", "shared-memory")
    ]
    for each in found["rows"]:
        assert each.keys() == FIELDS
        assert (each["type"], each["count"], each["wrong"]) == ("int32", each["size"] // 4, 0)
        assert each["time"] > 0
        assert each["predicted"] > 0
        assert each["algbw"] == each["busbw"] == pytest.approx(each["size"] / each["time"] / 1e9)
    assert Path("found.svg").read_text().startswith("<svg")


def test_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    link = {"microseconds": 20, "gigabytes_per_second": 25}
    Path("topology.json").write_text(json.dumps({"ranks_per_host": 8, "between": link}))
    arguments = ["--simulate", "--ranks", "4096", "--topology", "topology.json", "--sizes", "1M"]
    assert bench(*arguments, "--json", "found.json") == 0
    assert "# 4096 ranks, simulated" in capsys.readouterr().out
    found = json.loads(Path("found.json").read_text())
    assert found["simulated"]
    assert all(each["time"] == each["predicted"] and each["wrong"] is None for each in found["rows"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--algorithms", "ring,rng"], "no all-reduce is called 'rng'"),
        (["--type", "float31"], "no dtype 'float31'"),
        (["--sizes", "4Q"], "size '4Q'"),
        (["--ranks", "4"], "--ranks go with --simulate"),
        (["--simulate"], "how many ranks"),
        (["--simulate", "--ranks", "1"], "at least two ranks"),
        (["--simulate", "--ranks", "4", "--topology", "absent.json"], "no file absent.json"),
        (["--simulate", "--ranks", "4", "--algorithms", "shared-memory"], "no algorithm 'shared-memory'"),
        (["--simulate", "--ranks", "4", "--nnodes", "2"], "--nnodes go with ranks that run"),
        (
            ["--simulate", "--ranks", "4", "--processes", "2", "--type", "int8"],
            "--processes and --type go with",
        ),
        (["--algorithms", ""], "no all-reduce is called ''"),
        (["--plot", "found.png"], "found.png does not end with .svg"),
    ],
)
def test_what_cannot_work_is_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    running = () if "--simulate" in arguments else ("--processes", "2", "--device", "cpu")
    assert bench(*running, *arguments) == 2
    assert words in capsys.readouterr().err


def test_what_was_left_out_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = BenchResult(2, simulated=False, rows=[row()], left_out={"shared-memory": "not on this machine"})
    monkeypatch.setattr(benching, "bench_all_reduce", lambda *args, **kwargs: result)
    assert bench() == 0
    assert capsys.readouterr().out.splitlines()[1] == "# without shared-memory: not on this machine"


def test_a_wrong_sum_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = BenchResult(2, simulated=False, rows=[row(), row(wrong=3)])
    monkeypatch.setattr(benching, "bench_all_reduce", lambda *args, **kwargs: result)
    assert bench() == 1
    assert capsys.readouterr().out.splitlines()[-1].split()[-2:] == ["3", "N/A"]
