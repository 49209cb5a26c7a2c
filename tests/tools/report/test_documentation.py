"""The page on the report names all causes, and all parts of the file."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from evener.tools.report.schema import BROKEN_OFF, FINISHED, INTERRUPTED, UNDER_WAY, Report
from evener.tools.report.verdict import KINDS

PAGE = (Path(__file__).parents[3] / "docs/report.md").read_text()


def test_every_cause_is_explained() -> None:
    rows = re.findall(r"^\| (`.+?) \|", PAGE.partition("## The parts of the time")[0], re.M)
    assert sorted(re.findall(r"`([a-z ]+)`", " ".join(rows))) == sorted(KINDS)


def test_every_field_of_a_report_is_explained() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.partition("## report.json")[2], re.M)
    fields = {field.name for field in dataclasses.fields(Report)}
    assert set(rows) == fields
    assert all(f"`{state}`" in PAGE for state in (FINISHED, INTERRUPTED, UNDER_WAY, BROKEN_OFF))
