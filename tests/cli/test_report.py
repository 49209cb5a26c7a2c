"""What ``evener report`` and ``evener compare`` print and write, and with which status they end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evener.cli.main import main
from tests.tools.report.making import directory, step


def run(name: str, seconds: float = 0.1, batch_size: int = 8) -> str:
    records = [step(at, (seconds, seconds), loss=2.0 - at / 100) for at in range(60)]
    config = {"task": "digits", "batch_size": batch_size}
    return str(directory(Path(name), records, config=config, summary={"task": "digits", "world_size": 2}))


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_verdict_of_each_run_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", run("one"), run("other"), "--json", "report.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["one", "other"]
    found = json.loads(Path("report.json").read_text())
    assert (found["format"], found["version"], len(found["runs"])) == ("evener-report", 1, 2)


def test_a_file_is_read_like_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", run("one"), "--json", "report.json"])
    before = capsys.readouterr().out
    assert main(["report", "report.json", "--json", "-"]) == 0
    assert capsys.readouterr().out == Path("report.json").read_text()
    assert main(["report", "report.json"]) == 0
    assert capsys.readouterr().out == before


def test_data_on_standard_output_are_alone_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", run("one"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["identity"]["name"] == "one"


def test_a_file_that_is_there_is_kept() -> None:
    Path("report.json").write_text("mine")
    assert main(["report", run("one"), "--json", "report.json"]) == 2
    assert Path("report.json").read_text() == "mine"
    assert main(["report", "one", "--json", "report.json", "--overwrite"]) == 0
    assert Path("report.json").read_text() != "mine"


def test_a_name_that_a_terminal_would_obey_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", run("a\x1b[31m")]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["report", "."], 2, "is no run directory"),
        (["report", "nowhere"], 2, "is no run directory"),
        (["report", "other.txt"], 1, "is no report that can be read"),
        (["report", "one", "--json", "missing/file/report.json"], 0, ""),
        (["report", "one", "--plan", "nowhere.json"], 1, "nowhere.json"),
        (["compare", "one", "."], 2, "is no run directory"),
        (["compare", "one", "large"], 2, "cannot be compared: the batch size is 8 and 16"),
        (["compare", "one", "other", "--fail-slower", "much"], 2, "no percentage"),
        (["compare", "one"], 2, "NEW"),
    ],
)
def test_what_a_user_gets_wrong(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, words: str
) -> None:
    run("one"), run("other"), run("large", batch_size=16)
    Path("other.txt").write_text("no report")
    try:
        found = main(arguments)
    except SystemExit as error:
        found = int(str(error.code))
    assert found == status
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("threshold", "status"), [("5%", 1), ("5", 1), ("50%", 0), (None, 0)])
def test_a_slower_run_fails_past_the_threshold(
    capsys: pytest.CaptureFixture[str], threshold: str | None, status: int
) -> None:
    options = [] if threshold is None else ["--fail-slower", threshold]
    assert main(["compare", run("old"), run("new", 0.12), *options]) == status
    assert "new beside old: a step takes 120 ms instead of 100 ms, +20.0%" in capsys.readouterr().out


def test_a_comparison_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", run("old"), "--json", "old.json"])
    capsys.readouterr()
    assert main(["compare", "old.json", run("new"), "--json", "-"]) == 0
    printed = capsys.readouterr().out
    assert main(["compare", "old.json", "new", "--json", "compared.json"]) == 0
    found = json.loads(printed)
    assert json.loads(Path("compared.json").read_text()) == found
    assert (found["old"], found["new"], found["step_seconds"]["change"]) == ("old", "new", 0.0)
