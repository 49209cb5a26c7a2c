"""A rank that dies is replaced while the others stay: the training is that of a run that nobody disturbed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evener.fitting import fit
from evener.running import Trained
from evener.runtime.rendezvous import Rendezvous
from tests.faults import tasks_staying
from tests.faults.tasks_staying import DEATHS

PROCESSES = 3
LAST = 20
"""Steps of the run."""


def train(home: Path, task: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Trained:
    monkeypatch.setenv("EVENER_TESTS_FAULT", str(home))
    usual: dict[str, Any] = {
        "processes": PROCESSES,
        "device": "cpu",
        "run_dir": home / "run",
        "save_every": "1h",
        "timeout_seconds": 60.0,
        "rendezvous": Rendezvous(max_restarts=len(DEATHS)),
        "show": False,
    }
    return fit(getattr(tasks_staying, task), **(usual | settings))


def spared(home: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    (home / "spared").touch()
    return train(home, "holds", monkeypatch)


def records(home: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (home / "run/records.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.slow
def test_deaths_at_every_place_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """There is no checkpoint: all of it comes from what other ranks have in memory."""
    whole, home = tmp_path / "whole", tmp_path / "disturbed"
    whole.mkdir()
    home.mkdir()
    expected = spared(whole, monkeypatch)
    found = train(home, "holds", monkeypatch)
    assert {path.name for path in home.iterdir()} == {*DEATHS, "run"}
    said = capfd.readouterr().err
    assert said.count("the others stay, with what they hold in memory") == len(DEATHS)
    assert said.count("was killed by SIGKILL") == len(DEATHS) - 1
    assert "rank 1 raised RuntimeError: no luck" in said
    assert found.summary.weights_digest == expected.summary.weights_digest
    assert found.summary.metrics == expected.summary.metrics
    steps, whole_steps = (records(each, "step") for each in (home, whole))
    assert [step["step"] for step in steps] == list(range(LAST))
    assert [step["loss"] for step in steps] == [step["loss"] for step in whole_steps]
    evaluations = [(each["step"], each["metrics"]) for each in records(home, "evaluation")]
    assert evaluations == [(each["step"], each["metrics"]) for each in records(whole, "evaluation")]
    notes = [note["words"] for note in records(home, "note")]
    assert [note.partition(" with")[0] for note in notes] == [
        f"goes on after step {steps}" for steps in (3, 6, 10, 12, 16)
    ]
    assert not [note for note in notes if "begin anew" in note]


@pytest.mark.slow
def test_where_a_new_rank_dies_too_all_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From the file: those that stayed had no time to be sure of each other again."""
    whole, home = tmp_path / "whole", tmp_path / "disturbed"
    whole.mkdir()
    home.mkdir()
    for place in DEATHS.keys() - {"forward"}:
        (home / place).touch()
    expected = spared(whole, monkeypatch)
    found = train(home, "dies_twice", monkeypatch, save_every="2steps")
    said = capfd.readouterr().err
    assert "restart 1 of 5: of rank 1 alone" in said
    assert said.rstrip().endswith("restart 2 of 5")
    assert found.summary.weights_digest == expected.summary.weights_digest
    assert "goes on after step 2 of" in records(home, "note")[-1]["words"]
