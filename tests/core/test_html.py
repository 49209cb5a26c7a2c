from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from evener.core.html import html_table
from tests.training.reporting.test_terminal import summary

HOSTILE = "<script>alert(1)</script>&\"'\u202e\x00"


class Tags(HTMLParser):
    """The tags of a text, which are all closed in their order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert all(name in ("scope", "value", "max", "aria-label") for name, _ in attrs)
        self.found.append(tag)
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_texts_are_shown_as_they_are() -> None:
    tags = Tags(html_table(HOSTILE, [(HOSTILE, HOSTILE, 3)], ("", HOSTILE, HOSTILE)))
    assert "script" not in tags.found
    assert tags.words.count("<script>alert(1)</script>&\"'\\u202e\\x00") == 5
    assert tags.found.count("th") == 4


def test_a_summary_shows_the_result_and_the_ranks() -> None:
    words = Tags(summary()._repr_html_()).words
    assert {"digits: trained with ddp on 2 ranks", "0.9917", "runs/digits", "75.0%", "3.00 s"} <= {*words}
    alone = Tags(summary(world_size=1, shares=[1.0], ranks=[{}], interrupted=True)._repr_html_())
    assert "digits: stopped with ddp on 1 rank" in alone.words
    assert alone.found.count("table") == 1
    later = Tags(summary(samples_in_seconds=1000)._repr_html_()).words
    assert "1,000 of 28,740 in 6.5 s: 4,422 per second" in later
