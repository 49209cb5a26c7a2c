"""``evener train --report``: the page in the run directory, whatever ended the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.cli.report_at_end import REPORT, report_at_end, write_report
from evener.core.observer import Observer
from evener.core.records import StepRecord
from evener.training.fit import fit
from tests import tasks
from tests.distributed.processes import end, start_command


def trained(run_dir: Path, *others: Observer, wanted: bool = True) -> None:
    with report_at_end(wanted) as observers:
        own = [*observers, *others]
        fit(tasks.plain, processes=1, device="cpu", steps=4, run_dir=run_dir, observers=own, show=False)


def test_a_run_leaves_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path)
    assert "<html" in (tmp_path / REPORT).read_text()
    said = " ".join(capsys.readouterr().err.split())
    assert f"The report is in {tmp_path / REPORT}" in said


def test_a_run_that_fails_leaves_its_report_and_its_error(tmp_path: Path) -> None:
    class Broken(Observer):
        def step(self, record: StepRecord) -> None:
            if record.step == 2:
                raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        trained(tmp_path, Broken())
    assert "broken" in (tmp_path / REPORT).read_text()


def test_without_the_option_there_is_none(tmp_path: Path) -> None:
    trained(tmp_path, wanted=False)
    assert not (tmp_path / REPORT).exists()


def test_a_report_of_an_earlier_run_goes_first(tmp_path: Path) -> None:
    (tmp_path / REPORT).write_text("of an earlier run")
    with pytest.raises(KeyboardInterrupt), report_at_end(True) as observers:
        fit(
            tasks.plain,
            processes=1,
            device="cpu",
            steps=4,
            run_dir=tmp_path,
            observers=[*observers, Stopped()],
            show=False,
        )
    assert "of an earlier run" not in (tmp_path / REPORT).read_text()


class Stopped(Observer):
    """As if Ctrl-C came."""

    def step(self, record: StepRecord) -> None:
        raise KeyboardInterrupt


def test_what_fails_in_the_report_changes_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(str(tmp_path / "absent"))
    assert "could not be made" in capsys.readouterr().err
    write_report("s3://bucket/run")
    assert "evener report s3://bucket/run" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_the_command_writes_it_by_a_variable_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENER_REPORT", "yes")
    options = ("--processes", "2", "--device", "cpu", "--steps", "20", "--run-dir", tmp_path / "run")
    ended = end(start_command("train", "digits", *options))
    assert ended.status == 0, ended.err
    assert "<html" in (tmp_path / "run" / REPORT).read_text()
