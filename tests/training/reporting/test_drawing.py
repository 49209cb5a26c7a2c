"""Axes and lines of charts."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

from hypothesis import example, given
from hypothesis import strategies as st

from evener.training.reporting.drawing import Panel, Scale, svg, ticks_between, ticks_to


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
    (line,) = ElementTree.fromstring(svg("t", [Panel("p", "", [("a", [(0.0, 0.0)])])])).iter(
        "{http://www.w3.org/2000/svg}polyline"
    )
    assert line.attrib["points"] == "64.0,140.0"
