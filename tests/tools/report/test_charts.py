"""The charts of a report: what is drawn lies in the drawing, and no spike is lost."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.tools.report.charts import HEIGHT, WIDTH, Bar, BarPart, Spot, Trace, bars, lines
from evener.tools.report.numbers import axis_unit, value_text
from evener.tools.report.tables import TEXT, WHOLE, Table, tabulated

NOTHING = Table("", (), (), "")
FINITE = st.floats(-1e14, 1e14)


def places_of(path: str) -> list[tuple[int, int]]:
    """The places of path data of moves, relative lines and dots."""
    found: list[tuple[int, int]] = []
    for command, numbers in re.findall(r"([Mlh])([^Mlhz]*)", path):
        values = [int(number) for number in re.findall(r"-?\d+", numbers)]
        if command == "M":
            found.append((values[0], values[1]))
        for dx, dy in zip(values[::2], values[1::2], strict=False) if command == "l" else ():
            found.append((found[-1][0] + dx, found[-1][1] + dy))
    return found


def drawn(svg: str, kind: str) -> list[list[tuple[int, int]]]:
    root = ElementTree.fromstring(svg)
    return [
        places_of(path.attrib["d"]) for path in root.iter("path") if path.attrib["class"].startswith(kind)
    ]


def texts(svg: str) -> list[str]:
    return ["".join(each.itertext()) for each in ElementTree.fromstring(svg).iter("text")]


def trace(values: list[float | None], name: str = "a", style: str = "k0") -> Trace:
    spots = (None if value is None else Spot(step, value, value, value) for step, value in enumerate(values))
    return Trace(name, style, tuple(spots))


@given(st.lists(st.none() | FINITE, min_size=1, max_size=700), st.booleans())
def test_lines_lie_in_the_drawing_and_reach_their_ends(values: list[float | None], from_zero: bool) -> None:
    figure = lines("a", "s", [trace(values)], from_zero=from_zero)
    if figure is None:
        assert values == [None] * len(values)
        return
    (line,) = drawn(figure.svg, "line")
    assert line
    assert all(0 <= x <= 4 * WIDTH and 0 <= y <= 4 * HEIGHT for x, y in line)
    assert len(line) <= 241
    assert line == sorted(line, key=lambda place: place[0])


@settings(max_examples=30)
@given(st.integers(241, 1500), st.data())
def test_a_spike_of_one_step_is_seen(steps: int, data: st.DataObject) -> None:
    where = data.draw(st.integers(0, steps - 1))
    figure = lines("a", "", [trace([float(1000 * (step == where)) for step in range(steps)])])
    assert figure is not None
    shapes = drawn(figure.svg, "band") + drawn(figure.svg, "line")
    top = min(y for piece in shapes for _, y in piece)
    assert top == 4 * 10, "the highest tick is 1000"
    assert any("1,000" in cell for row in figure.table.rows for cell in row)


def test_a_gap_interrupts_a_line_and_a_lone_step_is_a_dot() -> None:
    figure = lines("a", "", [trace([1.0, None, 2.0, 3.0])])
    assert figure is not None
    (path,) = (
        each for each in ElementTree.fromstring(figure.svg).iter("path") if each.attrib["class"] == "line k0"
    )
    assert re.fullmatch(r"M\d+ \d+h0M\d+ \d+l\d+-\d+", path.attrib["d"])


def test_the_mean_of_merged_columns_counts_steps() -> None:
    spots = tuple(
        Spot(step, 1.0, 1.0, 1.0, 3) if step % 2 else Spot(step, 5.0, 5.0, 5.0) for step in range(480)
    )
    figure = lines("a", "", [Trace("a", "k0", spots)])
    assert figure is not None
    assert figure.legend == (("k0", "a", "mean 2"),)
    assert figure.table.rows[0][1] == "2 (1 to 5)"


def test_units_suit_the_numbers_and_marks_say_what_happened() -> None:
    figure = lines("t", "s", [trace([0.010, 0.020])], marks=[(1, "a <b>"), (7, "outside")], at_end=True)
    assert figure is not None
    assert figure.title == "t, ms"
    assert {"0", "5", "10", "15", "20", "step 0", "1"} <= set(texts(figure.svg))
    assert "step 1: a &lt;b&gt;" in figure.svg
    assert "outside" not in figure.svg
    assert figure.legend[0][2] == "last 20 ms"


def test_of_many_marks_some_are_drawn_and_it_is_said() -> None:
    figure = lines("t", "", [trace([1.0] * 100)], "Why.", marks=[(step, "a") for step in range(100)])
    assert figure is not None
    assert figure.svg.count('class="mark"') == 34
    assert figure.caption == "Why. 34 of 100 events are marked."


def test_the_axis_of_a_loss_need_not_begin_at_zero() -> None:
    figure = lines("t", "", [trace([2.9, 3.0])], from_zero=False)
    assert figure is not None
    assert "0" not in texts(figure.svg)
    assert {"2.9", "3"} <= set(texts(figure.svg))


def test_bars_stand_one_after_the_other_up_to_their_limit() -> None:
    row = Bar("rank 0", (BarPart("a", "k0", 0.0, 1.0), BarPart("b", "k1", 1.0, 3.0)), limit=8.0)
    figure = bars("t", "s", [row], NOTHING)
    assert figure is not None
    first, second = ElementTree.fromstring(figure.svg).iter("rect")
    assert float(second.attrib["x"]) == pytest.approx(
        float(first.attrib["x"]) + float(first.attrib["width"]), abs=0.11
    )
    assert float(second.attrib["width"]) == pytest.approx(3 * float(first.attrib["width"]), abs=0.3)
    assert "rank 0, b: 3 s" in figure.svg
    assert figure.legend == (("k0", "a", ""), ("k1", "b", ""))
    assert f"M{WIDTH - 10}.0" in figure.svg, "the limit is the greatest number"


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0, 0.0, 1e300])
def test_a_bar_whose_length_is_no_measurement_is_not_drawn(number: float) -> None:
    assert bars("t", "s", [Bar("a", (BarPart("a", "k0", 0.0, number),))], NOTHING) is None
    beside = Bar("a", (BarPart("a", "k0", 0.0, number), BarPart("b", "k1", 0.0, 1.0)))
    figure = bars("t", "s", [beside], NOTHING)
    assert figure is not None
    assert len(list(ElementTree.fromstring(figure.svg).iter("rect"))) == 1


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (-0.0123, "s", "-12.3 ms"),
        (0.0, "s", "0 s"),
        (1536, "B", "1.5 KiB"),
        (-1536, "B", "-1.5 KiB"),
        (0.2144, "1", "21.4%"),
        (12345.6, "samples/s", "12,346 samples/s"),
        (0.00012345, "", "0.0001234"),
        (3.0, "", "3"),
        (None, "s", "–"),
        (math.nan, "", "–"),
        (math.inf, "B", "–"),
    ],
)
def test_numbers_in_words(value: float | None, unit: str, text: str) -> None:
    assert value_text(value, unit) == text


@pytest.mark.parametrize(
    ("unit", "highest", "name"),
    [
        ("s", 1e-5, "us"),
        ("s", 0.5, "ms"),
        ("s", 3.0, "s"),
        ("s", 1e6, "h"),
        ("B", 2**21, "MiB"),
        ("1", 0.3, "%"),
    ],
)
def test_units_of_an_axis(unit: str, highest: float, name: str) -> None:
    factor, found = axis_unit(unit, highest)
    assert found == name
    assert 0 < highest / factor < 2000


def test_a_table_leaves_out_what_no_row_has_and_says_how_many_rows_there_are() -> None:
    table = tabulated(
        "t",
        [(i, "x") for i in range(70)],
        [
            ("number", WHOLE, lambda row: row[0]),
            ("never", "s", lambda row: None),
            ("text", TEXT, lambda row: row[1]),
        ],
    )
    assert table.head == ("number", "text")
    assert table.align == "rl"
    assert len(table.rows) == 64
    assert table.title == "t (64 of 70)"
