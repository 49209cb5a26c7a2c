"""The records of benchmarks, the pages that are made of them, and the runner of ``make bench``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import benchmarks.__main__ as runner
import pytest
from benchmarks.host_time import ADDED
from benchmarks.page import GLANCE, HERE, Entry, catalogue, marked_table, results_page, with_tables
from benchmarks.results import (
    DIRECTORY,
    PLACE,
    Table,
    as_text,
    cell,
    merge,
    problems,
    read_records,
    record,
    shown,
    spread,
)

ROOT = Path(__file__).parents[1]
RECORDS = read_records()
GOOD = """
from benchmarks.results import Table, cell, record
record("small", "one table", Table(["work", "time"], [["x", cell(2.5, "ms")]]))
"""


def a_record(**changed: Any) -> dict[str, Any]:
    table = {
        "date": "2026-11-26",
        "machine": "2 cores",
        "command": "python -m benchmarks.small",
        "ratio": "",
        "columns": ["work", "time"],
        "rows": [["x", {"value": 1.5, "unit": "ms"}]],
    }
    return {"benchmark": "small", "tables": {"one table": table | changed}}


class Small(Entry):
    """A benchmark whose code is its only argument."""

    @property
    def commands(self) -> list[list[str]]:
        return [["python", "-c", each] for each in self.runs]


def small(name: str = "small", *code: str) -> Entry:
    return Small(name, title="", compares="", seconds=1, runs=code or (GOOD,))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of records with one of a benchmark ``small``."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    directory = tmp_path / "results"
    directory.mkdir()
    (directory / "small.json").write_text(as_text(a_record()))
    return directory


# Records


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_has_the_format(name: str) -> None:
    text = (DIRECTORY / f"{name}.json").read_text()
    made = json.loads(text)
    assert not list(problems(name, made))
    assert text == as_text(made), "as the runner writes it"
    assert name in catalogue()


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": []},
        {"date": "26.11.2026"},
        {"command": ""},
        {"rows": [["x"]]},
        {"rows": [[{"value": 1, "unit": "ms"}, "x"]]},
        {"rows": [["x", 1.5]]},
        {"rows": [["x", {"value": 1.5}]]},
        {"rows": [["x", {"value": 1.5, "unit": "furlongs"}]]},
        {"rows": [["x", {"value": float("nan"), "unit": "ms"}]]},
        {"rows": [["x", {"value": 1.5, "unit": "ms", "mean": 1.5}]]},
        {"rows": [["x", {"value": 1.5, "unit": "ms", "ratio": 0.5}]]},
        {"ratio": "time over nothing"},
        {"more": 1},
    ],
)
def test_what_is_wrong_with_a_record_is_found_and_not_written(changed: Any, place: Path) -> None:
    before = (place / "small.json").read_text()
    wrong = a_record(**changed)
    assert list(problems("small", wrong))
    with pytest.raises(ValueError, match="the record of small would be wrong: one table"):
        merge(place, "small", wrong["tables"])
    assert (place / "small.json").read_text() == before


def test_a_record_of_another_name_is_wrong() -> None:
    assert not list(problems("small", a_record()))
    assert list(problems("large", a_record()))


def test_a_table_is_printed_as_it_comes_and_written_where_it_is_asked_for(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows() -> Any:
        yield ["x", cell(5.8712345, "ms", ratio=0.72, spread=0.031)]
        assert "| x | 5.871 ms (0.72x ±0.03) |" in capsys.readouterr().out, "before the second row"
        yield ["y", None]

    monkeypatch.delenv(PLACE, raising=False)
    record("small", "another", Table(["work", "time"], rows(), "time over half"))
    assert "another" not in read_records(place)["small"]
    monkeypatch.setenv(PLACE, str(place))
    monkeypatch.setattr(sys, "argv", ["x", "--turns", "2", "--json", str(place / "rows.json")])
    record("small", "another", Table(["work", "time"], rows(), "time over half"), beside="one GPU")
    tables = read_records(place)["small"]
    assert list(tables) == ["one table", "another"], "the other stays"
    assert tables["another"]["command"] == "python -m benchmarks.small --turns 2 --json rows.json"
    assert tables["another"]["machine"].endswith(", one GPU")
    assert tables["another"]["rows"][0][1] == {"value": 5.871, "unit": "ms", "ratio": 0.72, "spread": 0.031}
    record("small", "another", Table(["work", "time"], [["z", cell(3)]]))
    assert read_records(place)["small"]["another"]["rows"] == [["z", {"value": 3, "unit": ""}]], "the newest"


def test_an_error_while_it_is_written_leaves_the_record_whole(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (place / "small.json").read_text()

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        merge(place, "small", a_record(date="2026-11-27")["tables"])
    assert (place / "small.json").read_text() == before
    assert os.listdir(place) == ["small.json"]


def test_values_are_shown_with_their_units() -> None:
    assert shown(None) == "-"
    assert shown("a | b") == "a \\| b"
    assert shown(cell(118_197.4, "us", ratio=2.584)) == "118,200 us (2.58x)"
    assert shown(cell(-0.25, "points", spread=0.11)) == "-0.25 ±0.11 points"
    assert shown(cell(4.1, "ms", ratio=2.22, predicted=10.1)) == "4.1 ms [10.1] (2.22x)"
    assert shown(cell(12.3, "%")) == "12.3%"
    assert spread([1.0, 2.0]) is None
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == 1.5


# Catalogue and pages


def test_each_benchmark_is_in_the_catalogue() -> None:
    recording = {
        name for path in HERE.glob("*.py") for name in re.findall(r'\brecord\(\s*"(\w+)"', path.read_text())
    }
    assert recording == catalogue().keys()
    for name, entry in catalogue().items():
        assert "def main(" in (HERE / f"{name}.py").read_text()
        paragraphs = entry.notes.strip().split("\n\n") if entry.notes else []
        assert all(re.match(r"2026-\d\d-\d\d: ", each) for each in paragraphs), name


@pytest.mark.parametrize(("module", "name"), ADDED)
def test_what_a_benchmark_measures_in_the_package_is_there(module: ModuleType, name: str) -> None:
    """The stand-in's table takes these functions' time off: they have moved before, and the benchmark ended."""
    assert callable(getattr(module, name))


def test_make_bench_takes_less_than_45_minutes() -> None:
    assert sum(entry.seconds for entry in catalogue().values() if not entry.needs) < 45 * 60


def test_the_results_are_what_is_made_of_the_records() -> None:
    assert (HERE / "RESULTS.md").read_text() == results_page(catalogue(), RECORDS), (
        "python -m benchmarks --pages"
    )


def test_the_tables_at_a_glance_are_those_of_the_records() -> None:
    page = GLANCE.read_text()
    assert page.count("<!-- bars: ") > 5
    assert page == with_tables(page, RECORDS), "python -m benchmarks --pages"


def test_a_table_that_no_record_has_is_refused() -> None:
    made = {"small": a_record(rows=[["x", cell(1.5, "ms")], ["y", None]])["tables"]}
    assert (
        marked_table("small/one table | value | time", made)
        == "|  | time |\n|---|---|\n| x | 1.5 |\n| y | - |\n"
    )
    assert "y" not in marked_table("small/one table | value | time | rows: x", made)
    for what in ("small/another | value | time", "large/one table | value | time"):
        with pytest.raises(KeyError, match=f"there is no record {what.partition(' |')[0]}"):
            marked_table(what, made)
    with pytest.raises(KeyError, match="has no column 'speed', only work, time"):
        marked_table("small/one table | value | speed", made)


def numbers_of(text: str) -> set[str]:
    return set(re.findall(r"(?<![\d.-])\d+\.\d+(?![\d.])", text))


def test_figures_that_pages_quote_are_in_the_records() -> None:
    """Those of README's table, of the comparison's, and of the table of steps beside `fit`."""
    cells = [
        value
        for tables in RECORDS.values()
        for table in tables.values()
        for row in table["rows"]
        for value in row
        if isinstance(value, dict)
    ]
    known = {f"{each[key]:.2f}" for each in cells for key in ("value", "ratio") if key in each}
    readme = re.findall(r"^\|.*\|$", (ROOT / "README.md").read_text().partition("## Measured")[2], re.M)
    comparison = re.search(r"^\| workload \|.*\n(?:\|.*\n)+", (ROOT / "docs/compare.md").read_text(), re.M)
    assert comparison
    quoted = {
        number
        for text in (*readme, comparison[0])
        for number in numbers_of(re.sub(r"\]\([^)]*\)|MLP [\d-]+", "", text))
    }
    assert len(quoted) > 10
    assert not quoted - known, "the records have other figures now"


# The runner


def test_a_name_that_is_none_is_told_with_all_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--only", "overhead,overhed"]) == 2
    told = capsys.readouterr().err
    assert "there is no benchmark overhed. There are: balance, " in told
    assert "overhead" in told


def test_arguments_are_those_of_one_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        runner.main(["--", "--turns", "1"])
    assert "name it with --only" in capsys.readouterr().err


def test_a_benchmark_that_fails_keeps_its_record_and_stops_no_other(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (place / "late.json").write_text(as_text(a_record() | {"benchmark": "late"}))
    before = (place / "late.json").read_text()
    late = small("late", GOOD.replace("small", "late"), "raise SystemExit(3)")
    nothing, killed = small("nothing", "pass"), small("killed", "import os; os.kill(os.getpid(), 9)")
    assert runner.run_all([late, nothing, killed, small()], place) == 1
    told = capfd.readouterr().err
    assert "late failed, and its record is as before: status 3" in told
    assert "nothing failed, and its record is as before: it recorded nothing" in told
    assert "killed failed, and its record is as before: SIGKILL" in told
    assert (place / "late.json").read_text() == before, "also of the run that ended well"
    assert read_records(place)["small"]["one table"]["rows"] == [["x", {"value": 2.5, "unit": "ms"}]]
    assert (place.parent / "RESULTS.md").read_text().startswith("# Results")


def test_what_ends_well_has_status_0(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert runner.run_all([small()], place) == 0
    assert "== small: recorded, " in capfd.readouterr().out


def test_a_record_that_is_none_is_told(place: Path) -> None:
    (place / "small.json").write_text("{")
    assert "Expecting property name" in runner.run(small(), place)
    assert (place / "small.json").read_text() == "{"


def test_ctrl_c_ends_it_with_whole_files(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(entry: Entry, directory: Path) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    assert runner.main(["--only", "overhead", "--to", str(place.parent)]) == 128 + signal.SIGINT
    assert "the benchmarks that had ended are recorded" in capsys.readouterr().err


def test_nothing_is_left_of_a_program_that_takes_too_long(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, time; child = subprocess.Popen(['sleep', '60']); "
        f"pathlib.Path({str(told)!r}).write_text(str(child.pid)); time.sleep(60)"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        runner.status_of([sys.executable, "-c", code], dict(os.environ), 1.0)
    child = Path("/proc") / told.read_text() / "stat"
    until = time.monotonic() + 5
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until, "it still runs"
        time.sleep(0.02)


def test_the_makefile_hands_names_on() -> None:
    assert "python -m benchmarks --only '$(ONLY)'" in (ROOT / "Makefile").read_text()


@pytest.mark.slow
def test_a_real_benchmark_is_recorded(tmp_path: Path) -> None:
    arguments = ["--only", "overhead", "--to", str(tmp_path), "--", "--turns", "3", "--steps", "2"]
    assert runner.main(arguments) == 0
    table = read_records(tmp_path / "results")["overhead"]["two CPU ranks"]
    assert table["columns"][:2] == ["workload", "plain DDP"]
    assert table["command"] == "python -m benchmarks.overhead --turns 3 --steps 2"
    ours = table["columns"].index("Evener")
    assert len(table["rows"]) == 3
    for row in table["rows"]:
        assert row[1]["ratio"] == 1.0
        assert row[ours].keys() == {"value", "unit", "ratio", "spread"}
    assert "**two CPU ranks**" in (tmp_path / "RESULTS.md").read_text()
