from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from evener.errors import DataError
from evener.tools.report import ReportFile, json_of, read_report, report_of
from evener.tools.report.schema import Columns, MemoryOfRank
from tests.tools.report.making import directory, report, step


def test_a_report_that_is_read_is_the_one_that_was_written(tmp_path: Path) -> None:
    path = directory(
        tmp_path / "run", [step(at, memory_peak=[5, 6]) for at in range(9)], config={"a": [1, "x", None]}
    )
    file = ReportFile((report_of(path), report([{"compute": 0.1}])))
    (tmp_path / "report.json").write_text(json_of(file))
    assert read_report(tmp_path / "report.json") == file


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    found = json.loads(json_of(ReportFile((report(),))))
    found["runs"][0]["further"] = found["further"] = 1
    (tmp_path / "report.json").write_text(json.dumps(found))
    assert read_report(tmp_path / "report.json").runs == (report(),)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "no format"),
        ({"version": 2}, "version 2"),
        ({"runs": {}}, "runs is a dict"),
        ({"runs": [{}]}, r"runs\[0\] has no identity"),
        ({"runs": [1]}, r"runs\[0\] is a int"),
        (
            {"runs": [asdict(replace(report(), columns=Columns((0,), (9, 10))))]},
            r"runs\[0\] has series of other",
        ),
    ],
)
def test_another_file_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    found = json.loads(json_of(ReportFile((report(),)))) | change
    (tmp_path / "report.json").write_text(json.dumps(found))
    with pytest.raises(DataError, match=words):
        read_report(tmp_path / "report.json")


def test_the_place_of_a_wrong_value_is_named(tmp_path: Path) -> None:
    found = json.loads(json_of(ReportFile((replace(report(), memory=(MemoryOfRank(0, 5),)),))))
    found["runs"][0]["memory"][0]["peak"] = "5"
    (tmp_path / "report.json").write_text(json.dumps(found))
    with pytest.raises(DataError, match=r"runs\[0\].memory\[0\].peak is a str"):
        read_report(tmp_path / "report.json")


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(DataError, match=r"report\.json is no report"):
        read_report(tmp_path / "report.json")
