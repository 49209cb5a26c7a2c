"""A run drawn from its records."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from evener.cli.main import main
from evener.errors import DataError
from evener.tools.report import report_of
from evener.tools.report.plot import drawn

SVG = "{http://www.w3.org/2000/svg}"


def record(
    step: int, seconds: float = 0.1, shares: Any = (3, 1), times: Any = (0.05, None)
) -> dict[str, Any]:
    scalars = {"step": step, "epoch": 0, "loss": 1.0, "samples": 4, "seconds": seconds}
    return {"kind": "step", **scalars, "shares": shares, "compute_seconds": times}


def run(directory: Path, records: list[dict[str, Any]], end: str = "") -> Path:
    directory.mkdir()
    lines = [json.dumps(each) for each in ({"kind": "note", "step": 0, "words": "begun"}, *records)]
    (directory / "records.jsonl").write_text("\n".join(lines) + "\n" + end)
    return directory


def lines_of(text: str) -> list[list[tuple[float, ...]]]:
    found = ElementTree.fromstring(text).iter(f"{SVG}polyline")
    return [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()] for line in found
    ]


def texts_of(text: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(text).iter(f"{SVG}text")]


def test_each_rank_has_a_line_where_its_numbers_are(tmp_path: Path) -> None:
    shares = [(2, 2), (3, 1), (3, 1)]
    records = [record(i, shares=each) for i, each in enumerate(shares)]
    text = drawn([report_of(run(tmp_path / "a<b", records))])
    own, other, times, speed = lines_of(text)  # rank 1 has told no time
    assert [x for x, _ in own] == [64, 337, 610]
    assert own[0][1] == other[0][1]
    assert own[1][1] < other[1][1], "a larger share is further up"
    assert times[0][1] == times[2][1]
    assert speed[0][1] == pytest.approx(34), "at its highest tick"
    assert "a<b: 10 steps/s" in texts_of(text)
    assert {"rank 0", "rank 1", "step 0", "step 2"} <= set(texts_of(text))


def test_waiting_for_samples_belongs_to_the_time_of_a_step(tmp_path: Path) -> None:
    """A record's step begins when rank 0 has its samples."""
    records = [record(i) | {"input_seconds": [0.3, 0.1]} for i in range(8)]
    report = report_of(run(tmp_path / "slow", records))
    assert "slow: 2.5 steps/s" in texts_of(drawn([report]))
    (rate,) = [each for each in report.series if each.name == "throughput"]
    assert rate.mean == pytest.approx([4 / 0.4] * 8)
    assert report.samples_per_second == pytest.approx(4 / 0.4)


def test_shares_are_those_of_the_cost_where_it_is_known(tmp_path: Path) -> None:
    records = [record(i, shares=(1, 3)) | {"costs": [0.3, 0.1]} for i in range(3)]
    more, less, *_ = lines_of(drawn([report_of(run(tmp_path / "a", records))]))
    assert more[0][1] < less[0][1], "a larger share is further up"


def test_runs_are_compared_by_their_second_halves(tmp_path: Path) -> None:
    slow_at_first = [record(i, 9.0 if i < 4 else 0.1) for i in range(8)]
    runs = [
        run(tmp_path / "auto", slow_at_first),
        run(tmp_path / "equal", [record(i, 0.15) for i in range(8)]),
    ]
    assert "auto: 10 steps/s, 1.50x of equal" in texts_of(drawn([report_of(each) for each in runs]))


def test_ranks_may_come_and_times_be_unknown(tmp_path: Path) -> None:
    records = [record(0, shares=(4,), times=()), record(1, times=(math.nan, 0.1))]
    names = texts_of(drawn([report_of(run(tmp_path / "a", records))]))
    assert names.count("rank 0") == 1, "no time of it is known"
    assert names.count("rank 1") == 2


def test_many_steps_are_medians(tmp_path: Path) -> None:
    records = [record(i, 9.0 if i % 400 == 0 else 0.1) for i in range(4000)]
    *_, speed = lines_of(drawn([report_of(run(tmp_path / "a", records))]))
    assert 60 < len(speed) <= 120
    assert len({y for _, y in speed}) == 1


def test_the_last_line_may_be_half_written_and_no_other(tmp_path: Path) -> None:
    *_, speed = lines_of(drawn([report_of(run(tmp_path / "a", [record(0)], end='{"kind": "st'))]))
    assert len(speed) == 1
    broken = run(tmp_path / "b", [record(0)], end="{broken\n" + json.dumps(record(1)) + "\n")
    assert main(["plot", str(broken), "--out", str(tmp_path / "b.svg")]) == 1
    assert not (tmp_path / "b.svg").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        3,
        {"kind": "step"},
        record(0) | {"step": "0"},
        record(0) | {"step": None},
        record(0) | {"seconds": []},
        record(0) | {"seconds": True},
        record(0) | {"shares": 3},
        record(0) | {"shares": ["x"]},
        record(0) | {"compute_seconds": {"a": 1}},
    ],
    ids=str,
)
def test_a_record_of_another_form(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(DataError, match=r"line 3 is no record"):
        report_of(run(tmp_path / "a", [record(0), wrong, record(1)]))


@pytest.mark.parametrize("number", [None, math.nan, math.inf, -math.inf, 1e300, 0, -1])
def test_a_number_that_is_no_measurement(tmp_path: Path, number: Any) -> None:
    odd = record(1) | {"seconds": number, "shares": [number, 1], "compute_seconds": [number, number]}
    for records in ([record(0), odd, record(2)], [odd]):
        path = run(tmp_path / f"a{len(records)}", records)
        text = drawn([report_of(path), report_of(path)])
        assert all(math.isfinite(number) for line in lines_of(text) for point in line for number in point)


def test_names_of_a_stranger_order_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b]0;owned\x07\x9b\u202eb&<"
    path = run(tmp_path / name, [record(0)])
    out = tmp_path / "a.svg"
    assert main(["plot", str(path), str(path), "--out", str(out)]) == 0
    shown = r"a\x1b]0;owned\x07\x9b\u202eb&<"
    assert shown in capfd.readouterr().out
    assert any(text.startswith(f"{shown}: 10 steps/s") for text in texts_of(out.read_text()))
    assert main(["plot", str(tmp_path / name / "none"), "--out", str(out), "--overwrite"]) == 2
    said = capfd.readouterr().err
    assert shown in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("records", "out", "words"),
    [
        (None, "a.svg", "is no run directory"),
        ([], "a.svg", "has no record of a step"),
        ([record(0)], "there.svg", "is there already"),
    ],
)
def test_what_cannot_be_drawn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], records: Any, out: str, words: str
) -> None:
    (tmp_path / "there.svg").write_text("kept")
    directory = tmp_path / "run" if records is None else run(tmp_path / "run", records)
    assert main(["plot", str(directory), "--out", str(tmp_path / out)]) == 2
    assert words in capfd.readouterr().err
    assert (tmp_path / "there.svg").read_text() == "kept"


def test_a_drawing_has_the_name_of_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plot", str(tmp_path), "--out", "a.png"])
    assert "a.png does not end with .svg" in capfd.readouterr().err


def test_the_command_writes_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.svg"
    assert main(["plot", str(run(tmp_path / "a", [record(0)])), "--out", str(out)]) == 0
    assert capfd.readouterr().out == f"{out}: a: 10 steps/s\n"
    assert len(lines_of(out.read_text())) == 4
