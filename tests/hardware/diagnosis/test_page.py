"""The page on devices tells of every finding what the program does."""

from __future__ import annotations

from pathlib import Path

from evener.hardware.diagnosis.findings import KINDS, LEVELS

PAGE = (Path(__file__).parents[3] / "docs/devices.md").read_text()


def test_the_page_has_every_finding_with_its_remedy() -> None:
    ordered = sorted(KINDS, key=lambda kind: list(LEVELS).index(kind.level))
    rows = [f"| `{kind.name}` | {kind.level} | {kind.when} | {kind.remedy} |" for kind in ordered]
    start = PAGE.index("| finding |")
    table = PAGE[start:].split("\n\n")[0].splitlines()
    assert table[2:] == rows


def test_the_page_says_what_the_levels_mean() -> None:
    for level, words in LEVELS.items():
        assert f"| {level} | {words} |" in PAGE
