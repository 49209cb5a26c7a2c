"""The page of a report in a real browser, where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from evener.tools.report.page import page_of
from evener.tools.report.schema import Report, ReportFile
from tests.browser import Browser, chromium
from tests.tools.report.samples import report
from tests.tools.report.test_page import hostile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium on the PATH"),
]
ONE = [report()]
TWO = [report(), report(ranks=64, own_series=8)]
CUT = """[...document.querySelectorAll("body *")].filter(element => {
    const box = element.getBoundingClientRect();
    return box.width && box.right > innerWidth + 1 && !element.closest(".scroll, nav ul, pre, svg, .hidden, .skip");
}).map(element => element.outerHTML.slice(0, 80))"""
"""Elements that reach beyond the right edge, but for what scrolls in a box of its own."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize(
    "runs", [ONE, TWO, [hostile(report())]], ids=["one run", "two runs", "hostile names"]
)
def test_the_page_is_quiet_and_nothing_is_cut(
    browser: Browser, tmp_path: Path, runs: list[Report], width: int, scheme: str
) -> None:
    path = tmp_path / "report.html"
    path.write_text(page_of(ReportFile(tuple(runs))), encoding="utf-8")
    browser.show(path.as_uri(), width, 844, scheme)
    assert browser.messages() == []
    assert browser.requests() == [path.as_uri()]
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value(CUT) == []
    points = (
        "[...document.querySelectorAll('svg')].map(svg => svg.querySelectorAll('path.line, rect').length)"
    )
    assert min(browser.value(points)) > 0
    boxes = "[...document.querySelectorAll('path.line, rect')].filter(each => !each.getBoundingClientRect().width)"
    assert browser.value(f"{boxes}.length") == 0, "each line and each bar can be seen"
    small = "[...document.querySelectorAll('svg text')].map(text => text.getBoundingClientRect().height)"
    assert min(browser.value(small)) > 9, "labels can be read"


def test_numbers_open_without_a_script(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page_of(ReportFile(tuple(ONE))), encoding="utf-8")
    browser.show(path.as_uri(), 390, 844)
    browser.value("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.value(CUT) == []
    heights = (
        "[...document.querySelectorAll('details table')].map(table => table.getBoundingClientRect().height)"
    )
    assert min(browser.value(heights)) > 20


def test_the_keyboard_reaches_the_report_first(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page_of(ReportFile(tuple(ONE))), encoding="utf-8")
    browser.show(path.as_uri(), 1400, 900)
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert browser.value("document.activeElement.textContent") == "Skip to the report"
    assert browser.value("document.activeElement.getBoundingClientRect().left >= 0")
