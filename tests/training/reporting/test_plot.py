"""A run drawn from its records."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evener.cli.main import main
from evener.errors import DataError
from evener.training.reporting.drawing import Panel, Scale, svg, ticks_between, ticks_to
from evener.training.reporting.plot import RunSteps, drawn

SVG = "{http://www.w3.org/2000/svg}"


def record(
    step: int, seconds: float = 0.1, shares: Any = (3, 1), times: Any = (0.05, None)
) -> dict[str, Any]:
    return {"kind": "step", "step": step, "seconds": seconds, "shares": shares, "compute_seconds": times}


def run(directory: Path, records: list[dict[str, Any]], end: str = "") -> Path:
    directory.mkdir()
    lines = [json.dumps(each) for each in ({"kind": "event"}, *records)]
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
    steps = RunSteps.from_directory(
        run(tmp_path / "a<b", [record(i, shares=each) for i, each in enumerate(shares)])
    )
    text = drawn([steps])
    own, other, times, speed = lines_of(text)  # rank 1 has told no time
    assert [x for x, _ in own] == [64, 337, 610]
    assert own[0][1] == other[0][1]
    assert own[1][1] < other[1][1], "a larger share is further up"
    assert times[0][1] == times[2][1]
    assert speed[0][1] == pytest.approx(34), "at its highest tick"
    assert "a<b: 10 steps/s" in texts_of(text)
    assert {"rank 0", "rank 1", "step 0", "step 2"} <= set(texts_of(text))


def test_shares_are_those_of_the_cost_where_it_is_known(tmp_path: Path) -> None:
    records = [record(i, shares=(1, 3)) | {"costs": [0.3, 0.1]} for i in range(3)]
    steps = RunSteps.from_directory(run(tmp_path / "a", records))
    assert [line.points[0][1] for line in steps.shares] == pytest.approx([75, 25])


def test_runs_are_compared_by_their_second_halves(tmp_path: Path) -> None:
    slow_at_first = [record(i, 9.0 if i < 4 else 0.1) for i in range(8)]
    runs = [
        run(tmp_path / "auto", slow_at_first),
        run(tmp_path / "equal", [record(i, 0.15) for i in range(8)]),
    ]
    assert "auto: 10 steps/s, 1.50x of equal" in texts_of(
        drawn([RunSteps.from_directory(each) for each in runs])
    )


def test_ranks_may_come_and_times_be_unknown(tmp_path: Path) -> None:
    records = [record(0, shares=(4,), times=()), record(1, times=(math.nan, 0.1))]
    names = texts_of(drawn([RunSteps.from_directory(run(tmp_path / "a", records))]))
    assert names.count("rank 0") == 1, "no time of it is known"
    assert names.count("rank 1") == 2


def test_many_steps_are_medians(tmp_path: Path) -> None:
    found = run(tmp_path / "a", [record(i, 9.0 if i % 10 == 0 else 0.1) for i in range(5000)])
    *_, speed = lines_of(drawn([RunSteps.from_directory(found)]))
    assert 100 < len(speed) < 130
    assert len({y for _, y in speed}) == 1


def test_the_last_line_may_be_half_written_and_no_other(tmp_path: Path) -> None:
    assert (
        len(RunSteps.from_directory(run(tmp_path / "a", [record(0)], end='{"kind": "st')).speed.points) == 1
    )
    broken = run(tmp_path / "b", [record(0)], end="{broken\n" + json.dumps(record(1)) + "\n")
    assert main(["plot", str(broken), "--out", str(tmp_path / "b.svg")]) == 1
    assert not (tmp_path / "b.svg").exists()


def test_no_more_is_kept_than_is_drawn(tmp_path: Path) -> None:
    """Whatever the number of steps; a line of medians is the same as that of all steps."""
    found = RunSteps.from_directory(run(tmp_path / "a", [record(i, 0.1 + i % 7 / 100) for i in range(6000)]))
    lines = [*found.shares, *found.milliseconds, found.speed]
    assert [len(line.points) for line in lines] == [120, 120, 120, 0, 120]
    assert not any(line._values for line in lines)


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
        record(0) | {"shares": ["1"]},
        record(0) | {"compute_seconds": {}},
    ],
    ids=str,
)
def test_a_record_of_another_form(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(DataError, match=r"line 3 is no record"):
        RunSteps.from_directory(run(tmp_path / "a", [record(0), wrong, record(1)]))


@pytest.mark.parametrize("number", [None, math.nan, math.inf, -math.inf, 1e300, 10**400, 0, -1])
def test_a_number_that_is_no_measurement(tmp_path: Path, number: Any) -> None:
    odd = record(1) | {"seconds": number, "shares": [number, 1], "compute_seconds": [number, number]}
    for records in ([record(0), odd, record(2)], [odd]):
        path = run(tmp_path / f"a{len(records)}", records)
        text = drawn([RunSteps.from_directory(path), RunSteps.from_directory(path)])
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


@given(st.floats(1e-6, 1e9))
def test_ticks_are_round_and_reach_as_far_as_needed(highest: float) -> None:
    ticks = ticks_to(highest)
    assert 3 <= len(ticks) <= 7
    assert ticks[0] == 0
    assert ticks[-2] < highest <= ticks[-1] * (1 + 1e-8)
    digits = f"{ticks[1]:.6e}".split("e")[0].rstrip("0").rstrip(".")
    assert digits in ("1", "2", "5")


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
@example(-1e308, 1.7e308)
@example(0.0, 5e-324)
@example(-1.7e308, -1.7e308)
def test_numbers_of_any_size_have_their_place_on_an_axis(one: float, other: float) -> None:
    lowest, highest = sorted((one, other))
    for ticks in (ticks_to(highest), ticks_between(lowest, highest)):
        assert 2 <= len(ticks) <= 9
        assert ticks == sorted(set(ticks))
        assert all(map(math.isfinite, ticks))
    scale = Scale((0.0, 1.0), (ticks[0], ticks[-1]), 0.0, 1.0, 0.0, 100.0)
    for number in (lowest, highest):
        assert -0.01 <= scale.y(number) <= 100.01


def test_a_line_of_one_point_of_nothing() -> None:
    assert lines_of(svg("t", [Panel("p", "", [("a", [(0.0, 0.0)])])])) == [[(64.0, 140.0)]]
