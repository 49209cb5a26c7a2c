"""The page on devices tells of every finding what the program does."""

from __future__ import annotations

from pathlib import Path

from evener.hardware.diagnosis.diagnose import TABLE
from evener.hardware.diagnosis.findings import LEVELS

PAGE = (Path(__file__).parents[3] / "docs/devices.md").read_text()


def test_the_page_has_every_finding_with_its_remedy() -> None:
    table = PAGE[PAGE.index("| finding |") :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in table]
    assert [(name, level, remedy) for name, level, _, remedy in rows] == [
        (name, level, remedy) for level, entries in TABLE.items() for name, (_, remedy) in entries.items()
    ]
    assert all(when for _, _, when, _ in rows)


def test_the_page_says_what_the_levels_mean() -> None:
    for level, words in LEVELS.items():
        assert f"| {level} | {words} |" in PAGE
