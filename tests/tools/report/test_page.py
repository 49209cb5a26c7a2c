"""The page of a report, as a browser would read it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evener.errors import DataError
from evener.tools.report import schema
from evener.tools.report.json_file import json_of, read_report
from evener.tools.report.page import page_of
from evener.tools.report.schema import (
    Cause,
    Columns,
    Goodput,
    Report,
    ReportFile,
    RunEvent,
    RunIdentity,
    Series,
    Span,
    TimelineStep,
    Verdict,
)
from tests.tools.report.samples import report

VOID = {"meta", "link"}
HOSTILE = "<script>alert(1)</script>\"'`&\u202eevil\u2066\x00\x1b[31m\x85\ud800]]>--><style>"
SHOWN = r"\u202eevil\u2066\x00\x1b[31m\x85\ud800"


class Page(HTMLParser):
    """Parses a page and asserts that each element is closed where it must be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), "no attribute twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def values(self, attribute: str) -> list[str]:
        return [found[attribute] or "" for _, found in self.tags if attribute in found]


def page(*runs: Report, notice: str = "") -> tuple[str, Page]:
    text = page_of(ReportFile(runs), notice)
    return text, Page(text)


def headings(text: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', text)


def test_every_section_of_a_run_is_there_and_has_points() -> None:
    text, parsed = page(report())
    assert headings(text) == [
        "time",
        "loss",
        "speed",
        "shares",
        "ranks",
        "memory",
        "collectives",
        "timeline",
        "events",
        "prediction",
        "merges",
        "settings",
        "reproduce",
    ]
    charts = re.findall(r"<svg .*?</svg>", text, re.S)
    assert len(charts) > 20
    for chart in charts:
        root = ElementTree.fromstring(chart)
        assert root.attrib["role"] == "img"
        assert root[0].tag == "title"
        assert root[0].text
        assert root[1].tag == "desc"
        assert root[1].text
        kinds = [each.attrib.get("class", "").partition(" ")[0] for each in root.iter()]
        assert kinds.count("line") + len(list(root.iter("rect"))) > 0
    assert text.count("<details>") == len(charts), "a table behind each chart"
    assert "57% of the time is compute, 21% waits for rank 2." in parsed.text


def test_the_first_screen_is_the_verdict_with_the_next_step() -> None:
    _, parsed = page(report())
    words = parsed.text.index("Rank 2 takes 2.1x as long for a sample.")
    spent = parsed.text.index("57% of the time")
    advice = parsed.text.index("--balance auto")
    goodput = parsed.text.rindex("Where the time went", 0, parsed.text.index("Parts of a step are means"))
    assert words < advice < spent < goodput
    assert "1.18x as fast" in parsed.text
    assert "21% of training" in parsed.text
    assert "54.5%, 20 s" in parsed.text[goodput:], "compute of all time, in the legend"


def test_nothing_is_loaded_and_nothing_may_be() -> None:
    text, parsed = page(report())
    assert not [tag for tag, _ in parsed.tags if tag in ("script", "iframe", "img", "object", "base", "form")]
    assert not parsed.values("src")
    assert not parsed.values("style"), "the policy forbids it"
    assert not [name for _, found in parsed.tags for name in found if name.startswith("on")]
    assert all(link.startswith("#") or link == "data:," for link in parsed.values("href"))
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert "@import" not in text
    (policy,) = (
        found["content"] or ""
        for _, found in parsed.tags
        if found.get("http-equiv") == "Content-Security-Policy"
    )
    style = re.search(r"<style>(.*?)</style>", text, re.S)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; ")
    assert "unsafe" not in policy


def test_links_and_names_inside_of_the_page_lead_somewhere() -> None:
    for runs in ([report()], [report(), report()]):
        _, parsed = page(*runs)
        names = parsed.values("id")
        assert len(names) == len(set(names))
        assert {link.removeprefix("#") for link in parsed.values("href") if link.startswith("#")} <= set(
            names
        )
        assert set(parsed.values("aria-labelledby")) <= set(names)


def test_headings_go_down_one_by_one() -> None:
    _, parsed = page(report(), report())
    levels = [int(tag[1]) for tag, _ in parsed.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels))


def test_each_table_has_headings_for_its_rows_and_columns() -> None:
    _, parsed = page(report())
    tables = [tag for tag, _ in parsed.tags].count("table")
    assert [tag for tag, _ in parsed.tags].count("caption") == tables
    scopes = parsed.values("scope")
    assert len(scopes) == [tag for tag, _ in parsed.tags].count("th")
    assert scopes.count("row") > tables
    assert sum("scroll" in (found.get("class") or "") for _, found in parsed.tags) == tables


def test_what_is_not_known_is_left_out() -> None:
    bare = Report(
        RunIdentity("a", "t", "", 1, (), schema.BROKEN_OFF, 0, 0, 0.0),
        Verdict("No step was taken.", False),
        Goodput(),
    )
    text, parsed = page(bare)
    assert headings(text) == ["settings"]
    assert "No step was taken." in parsed.text
    assert "broken off" in parsed.text


def test_what_is_too_much_to_be_drawn_is_said() -> None:
    run = report(ranks=64, own_series=8)
    many = {f"metric {number}": 1.0 for number in range(15)}
    collectives = run.collectives * 10
    run = replace(
        run,
        evaluations=tuple(replace(each, metrics=many) for each in run.evaluations),
        collectives=collectives,
    )
    _, parsed = page(run)
    for words in (
        "3 metrics more are in the data",
        "The slowest and the fastest of 64 ranks.",
        "The 12 largest of 64 ranks.",
        "12 of 64 ranks are drawn.",
        "The 12 longest of 20.",
        "(64 of 256)",
    ):
        assert words in parsed.text


def test_a_healthy_run_says_so() -> None:
    text, parsed = page(replace(report(), verdict=Verdict("Nothing stands out.", True)))
    assert "Nothing stands out." in parsed.text
    assert 'class="causes"' not in text


def test_runs_stand_side_by_side_and_say_where_they_differ() -> None:
    first, second = report(), report(ranks=2)
    second = replace(second, identity=replace(second.identity, settings={"batch_size": 64, "lr": 0.2}))
    text, parsed = page(first, second)
    assert "runs<first> (1)" in parsed.text
    assert "runs<first> (2): time of each rank" in parsed.text
    rows = re.findall(r"<tr>.*?</tr>", text)
    assert [row for row in rows if "lr (differs)" in row and ">0.1<" in row and ">0.2<" in row]
    loss = next(each for each in re.findall(r"<svg .*?</svg>", text, re.S) if "<title>Loss</title>" in each)
    assert loss.count('class="line ') == 2


def test_charts_of_runs_side_by_side_have_the_same_axis() -> None:
    slow = report()
    fast = replace(
        slow,
        series=tuple(
            replace(each, maximum=tuple(value and value / 10 for value in each.maximum))
            for each in slow.series
        ),
    )
    text, _ = page(slow, fast)
    charts = [
        each for each in re.findall(r"<svg .*?</svg>", text, re.S) if "compute of a step</title>" in each
    ]
    ticks = [re.findall(r'text-anchor="end">([\d.]+)<', chart) for chart in charts]
    assert len(charts) == 2
    assert ticks[0] == ticks[1]


def hostile(run: Report) -> Report:
    identity = replace(
        run.identity,
        name=HOSTILE,
        task=HOSTILE,
        strategy=HOSTILE,
        devices=(HOSTILE,) * run.identity.world_size,
        settings={HOSTILE: HOSTILE, "b": {HOSTILE: [HOSTILE]}},
        versions={HOSTILE: HOSTILE},
        started=HOSTILE,
        command=HOSTILE,
        allreduce=HOSTILE,
        notes=(HOSTILE,),
        state=HOSTILE,
    )
    step = TimelineStep(3, 1.0, HOSTILE, (Span(0, HOSTILE, 0.0, 1.0),))
    return replace(
        run,
        identity=identity,
        verdict=Verdict(HOSTILE, False, (Cause(HOSTILE, HOSTILE, 0, 1.0, 0.1, HOSTILE, 1.1),) * 2),
        events=(RunEvent(1, "death", HOSTILE, 0), RunEvent(2, "shares", HOSTILE, None, (0.5,), HOSTILE)),
        evaluations=tuple(replace(each, metrics={HOSTILE: 0.5}) for each in run.evaluations),
        collectives=tuple(replace(each, name=HOSTILE, algorithm=HOSTILE) for each in run.collectives),
        attempts=tuple(replace(each, reason=HOSTILE, started=HOSTILE) for each in run.attempts),
        ranks=tuple(replace(each, device=HOSTILE, host=HOSTILE) for each in run.ranks),
        timeline=(step,),
        prediction=run.prediction and replace(run.prediction, words=HOSTILE),
        merges=run.merges and replace(run.merges, words=(HOSTILE,), versions_old={HOSTILE: 1}),
    )


def test_names_of_a_stranger_are_shown_as_text() -> None:
    text, parsed = page(hostile(report()), notice=HOSTILE)
    tags = {tag for tag, _ in parsed.tags}
    assert tags == {tag for tag, _ in page(report(), notice="a")[1].tags}, "no element of theirs"
    assert "<script>alert(1)</script>" in parsed.text
    assert SHOWN in parsed.text
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff]", text
    )
    text.encode()
    for chart in re.findall(r"<svg .*?</svg>", text, re.S):
        ElementTree.fromstring(chart)
    known = {name for found in page(report())[1].values("class") for name in found.split()}
    assert {name for _, found in parsed.tags for name in (found.get("class") or "").split()} - known <= {
        "notice"
    }


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e300, -1e300, 5e-324])
def test_a_number_that_is_no_measurement(number: float) -> None:
    run = report(steps=40, columns=40)
    odd = tuple(
        Series(
            each.name,
            each.unit,
            *((number, *values[1:]) for values in (each.minimum, each.mean, each.maximum)),
            each.rank,
        )
        for each in run.series
    )
    spans = (Span(0, "forward", number, number),)
    text, _ = page(replace(run, series=odd, timeline=(TimelineStep(1, number, "odd", spans),)))
    assert "nan" not in text.lower().replace("nanosecond", "")
    assert not re.search(r"\binf\b", text)


ODD: dict[type, tuple[Any, ...]] = {
    int: (0, -1, 1 << 62, -1 << 62, 10**400),
    float: (0.0, -1.0, 1e308, -1e308, 5e-324, 10**400),
    str: ("", HOSTILE, "x" * 5000),
    list: ([],),
    dict: ({},),
    bool: (True,),
    type(None): (None, 0, 1e308, HOSTILE),
}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_data_of_a_stranger_are_refused_or_drawn(tmp_path: Path, data: st.DataObject) -> None:
    content = json.loads(json_of(ReportFile((report(steps=30, ranks=2, columns=5),))))
    for _ in range(data.draw(st.integers(1, 4))):
        place = content["runs"][0]
        name = data.draw(st.sampled_from(sorted(place)))
        while isinstance(place[name], dict | list) and place[name] and data.draw(st.integers(0, 9)):
            place = place[name]
            keys = range(len(place)) if isinstance(place, list) else sorted(place)
            name = data.draw(st.sampled_from(keys))
        place[name] = data.draw(st.sampled_from(ODD[type(place[name])]))
    path = tmp_path / "report.json"
    path.write_text(json.dumps(content))
    try:
        file = read_report(path)
    except DataError:
        return
    Page(page_of(file))


def test_a_name_as_long_as_a_book_is_shortened() -> None:
    run = report()
    book = replace(run, identity=replace(run.identity, name="a" * 10**6, command="b" * 10**6))
    assert len(page_of(ReportFile((book,)))) < 300_000


def test_the_page_has_the_same_bytes_each_time() -> None:
    assert page_of(ReportFile((report(),))) == page_of(ReportFile((report(),)))


def test_the_page_is_small() -> None:
    small = page_of(ReportFile((report(1000, 4, 1000),)))
    assert len(small.encode()) < 300_000
    begin = time.perf_counter()
    large = page_of(ReportFile((report(1_000_000, 64, 1000, own_series=64),)))
    print(f"{len(small):,} and {len(large):,} bytes, {time.perf_counter() - begin:.2f} s")
    assert len(large.encode()) < 3_000_000


def test_columns_may_be_none() -> None:
    run = report()
    assert "time" in headings(page_of(ReportFile((replace(run, columns=Columns()),))))
