from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from evener.training.reporting.chart import size_chart, size_text

SVG = "{http://www.w3.org/2000/svg}"


def drawn(lines: dict[str, list[tuple[float, float]]]) -> ElementTree.Element:
    return ElementTree.fromstring(size_chart(lines, "a < b", "GB/s & more"))


def curves(lines: dict[str, list[tuple[float, float]]]) -> list[list[tuple[float, float]]]:
    found = []
    for line in drawn(lines).iter(f"{SVG}polyline"):
        points = [point.split(",") for point in line.attrib["points"].split()]
        found.append([(float(x), float(y)) for x, y in points])
    return found


def test_every_line_is_drawn_and_named() -> None:
    root = drawn({"ring": [(1024, 1.0), (4096, 2.0)], "<tree>": [(1024, 0.5)]})
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert {"a < b", "GB/s & more", "ring", "<tree>", "1K", "4K"} <= set(texts)
    assert len(list(root.iter(f"{SVG}polyline"))) == 2


def test_sizes_are_logarithmic_and_larger_values_are_higher() -> None:
    ((a, b, c),) = curves({"ring": [(1024, 1.0), (4096, 2.0), (16384, 4.0)]})
    assert b[0] - a[0] == pytest.approx(c[0] - b[0], abs=0.11)
    assert 2 * (a[1] - b[1]) == pytest.approx(b[1] - c[1], abs=0.3)
    assert a[1] > b[1] > c[1]


@pytest.mark.parametrize(
    "points",
    [[(4096.0, 3.0)], [(4096.0, 0.0)], [(1.0, 1e-9), (2.0**40, 1e-9)], [(3.0, 123456.0), (1000.0, 1.0)]],
    ids=str,
)
def test_what_is_drawn_lies_inside_the_page(points: list[tuple[float, float]]) -> None:
    width, height = map(float, drawn({"any": points}).attrib["viewBox"].split()[2:])
    assert all(0 <= x <= width and 0 <= y <= height for x, y in curves({"any": points})[0])


def test_a_chart_needs_a_point() -> None:
    with pytest.raises(ValueError, match="nothing to plot"):
        size_chart({"ring": []}, "title", "label")


def test_there_is_a_color_for_each_of_the_all_reduces() -> None:
    text = size_chart({str(n): [(1024, n)] for n in range(9)}, "title", "label")
    assert len(set(re.findall(r'polyline .*stroke="(#\w+)"', text))) == 9


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(1, "1"), (1023, "1023"), (4096, "4K"), (25 << 20, "25M"), (1 << 30, "1G"), (1500, "1500")],
)
def test_sizes_as_they_are_named(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text
