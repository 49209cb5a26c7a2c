from __future__ import annotations

import json
from pathlib import Path

import pytest

from evener.errors import ConfigurationError, DivergenceError
from evener.fitting import fit
from evener.rundir import RunDirectory, new_run_dir
from tests import tasks


def test_the_name_of_a_run_directory(tmp_path: Path) -> None:
    assert new_run_dir("my.package:task", 0.0, tmp_path).name.startswith("my-package-task-19")


def test_runs_that_start_in_one_second_have_directories_of_their_own(tmp_path: Path) -> None:
    first, second, third = (new_run_dir("digits", 0.0, tmp_path) for _ in range(3))
    assert len({first, second, third}) == 3
    assert second.name == f"{first.name}-2"
    assert all(path.is_dir() for path in (first, second, third))


def test_a_directory_is_of_one_run_at_a_time(tmp_path: Path) -> None:
    with RunDirectory(tmp_path):
        with pytest.raises(ConfigurationError, match=r"another run writes to .*process \d+ on .*--run-dir"):
            fit(tasks.plain, processes=1, device="cpu", run_dir=tmp_path, show=False)
        assert not (tmp_path / "records.jsonl").exists()
    with RunDirectory(tmp_path):
        pass


def test_a_file_is_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot hold a run"), RunDirectory(tmp_path / "file"):
        pass


def test_what_an_earlier_run_left_stays_until_the_new_one_has_begun(tmp_path: Path) -> None:
    fit(tasks.plain, processes=1, device="cpu", run_dir=tmp_path, steps=2, show=False)
    before = (tmp_path / "records.jsonl").read_text(), (tmp_path / "config.json").read_text()
    with pytest.raises(Exception, match="no checkpoint at"):
        fit(tasks.plain, processes=1, device="cpu", run_dir=tmp_path, resume=tmp_path / "no", show=False)
    assert ((tmp_path / "records.jsonl").read_text(), (tmp_path / "config.json").read_text()) == before
    fit(tasks.plain, processes=1, device="cpu", run_dir=tmp_path, steps=1, show=False)
    steps = [json.loads(line)["step"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert steps == [0, 1]  # a step, and the evaluation after it


def test_a_summary_is_never_that_of_an_earlier_run(tmp_path: Path) -> None:
    fit(tasks.plain, processes=1, device="cpu", run_dir=tmp_path, steps=1, show=False)
    assert (tmp_path / "summary.json").exists()
    with pytest.raises(DivergenceError):
        fit(tasks.one_bad_target, processes=1, device="cpu", run_dir=tmp_path, show=False)
    assert not (tmp_path / "summary.json").exists()
