"""A rank that dies is replaced while the others stay: the training is that of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from evener.core.records import RunSummary
from evener.distributed.launch.rendezvous import Rendezvous
from evener.training.fit import fit
from tests.distributed.processes import call
from tests.faults import tasks_staying
from tests.tiers import NIGHTLY, SLOW, spread

PROCESSES = 3
LAST = 20
"""Steps of the run."""


def train(home: Path, task: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> RunSummary:
    monkeypatch.setenv("EVENER__TESTS_FAULT", str(home))
    usual: dict[str, Any] = {
        "processes": PROCESSES,
        "device": "cpu",
        "run_dir": home / "run",
        "save_every": "1h",
        "timeout_seconds": 60.0,
        "rendezvous": Rendezvous(max_restarts=5),
        "show": False,
    }
    return call(summary_of, getattr(tasks_staying, task), **(usual | settings))


def summary_of(task: Any, **settings: Any) -> RunSummary:
    return fit(task, **settings).summary


def records(home: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (home / "run/records.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture
def homes(tmp_path: Path) -> tuple[Path, Path]:
    """Of a run that nobody disturbs, and of another."""
    whole, home = tmp_path / "whole", tmp_path / "disturbed"
    whole.mkdir()
    home.mkdir()
    return whole, home


def undisturbed(home: str, task: str, **settings: Any) -> RunSummary:
    """On a rank that is up already."""
    os.environ["EVENER__TESTS_FAULT"] = home
    run = Path(home) / "run"
    return fit(getattr(tasks_staying, task), device="cpu", run_dir=run, show=False, **settings).summary


PLACES = ("forward", "backward", "update", "raise", "evaluation")


@pytest.mark.slow
def test_deaths_at_every_place_leave_no_trace(
    homes: tuple[Path, Path], ranks: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """There is no checkpoint: all of it comes from what other ranks have in memory."""
    whole, home = homes
    expected = ranks(PROCESSES).run(undisturbed, str(whole), "holds")[0]
    for place in PLACES:
        (home / place).touch()
    found = train(home, "holds", monkeypatch)
    assert [path.name for path in home.iterdir()] == ["run"], "all have died"
    said = capfd.readouterr().err
    assert said.count("the others stay, with what they hold in memory") == len(PLACES)
    assert said.count("was killed by SIGKILL") == len(PLACES) - 1
    assert "rank 1 raised RuntimeError: no luck" in said
    assert (found.weights_digest, found.metrics) == (expected.weights_digest, expected.metrics)
    steps, whole_steps = (records(each, "step") for each in (home, whole))
    assert [step["step"] for step in steps] == list(range(LAST))
    assert [step["loss"] for step in steps] == [step["loss"] for step in whole_steps]
    evaluations = [(each["step"], each["metrics"]) for each in records(home, "evaluation")]
    assert evaluations == [(each["step"], each["metrics"]) for each in records(whole, "evaluation")]
    notes = [note["words"] for note in records(home, "note")]
    assert [int(note.split()[4]) for note in notes] == [3, 6, 10, 12, 16]
    assert not [note for note in notes if "begin anew" in note]


@pytest.mark.slow
def test_deaths_leave_the_bits_of_a_run_on_one_rank(
    homes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, home = homes
    exact: dict[str, Any] = {"exact": "bits", "grain": 2}
    monkeypatch.setenv("EVENER__TESTS_FAULT", str(whole))
    expected = undisturbed(str(whole), "grains", processes=1, **exact)
    for place in PLACES[:3]:
        (home / place).touch()
    found = train(home, "grains", monkeypatch, balance="tests.balancers:Random", **exact)
    assert capfd.readouterr().err.count("the others stay, with what they hold in memory") == 3
    assert (found.weights_digest, found.metrics) == (expected.weights_digest, expected.metrics)
    steps, whole_steps = (records(each, "step") for each in (home, whole))
    assert [step["loss"] for step in steps] == [step["loss"] for step in whole_steps]


@pytest.mark.parametrize(
    ("task", "place", "why", "deaths"),
    spread(
        [
            (
                "joint",
                "joint update",
                "no rank that stayed was between two updates: all have to start again",
                1,
            ),
            ("one_module", "forward", "Task.model returned a module that this process has trained before", 1),
            ("dies_twice", "forward", r"rank 1 \(pid \d+\) was killed by SIGKILL", 2),
        ],
        SLOW,
        NIGHTLY,
    ),
)
def test_where_memory_does_not_do_all_start_again_from_the_file(
    homes: tuple[Path, Path],
    ranks: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    task: str,
    place: str,
    why: str,
    deaths: int,
) -> None:
    """Each death counts as one restart."""
    whole, home = homes
    expected = ranks(PROCESSES).run(undisturbed, str(whole), "holds" if task == "dies_twice" else task)[0]
    (home / place).touch()
    rendezvous = Rendezvous(max_restarts=deaths)
    found = train(home, task, monkeypatch, save_every="1steps", save_mode="blocking", rendezvous=rendezvous)
    said = capfd.readouterr().err
    again = rf"restart {deaths} of {deaths}\n$"
    assert re.search(rf"restart 1 of {deaths}: of rank [01] alone(?s:.*){why}(?s:.*){again}", said)
    assert found.weights_digest == expected.weights_digest
    assert f"goes on after step {tasks_staying.STEPS[place]} of" in records(home, "note")[-1]["words"]
    assert [step["step"] for step in records(home, "step")] == list(range(LAST))
