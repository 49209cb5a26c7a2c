"""Ranks that stall and die in asynchronous training: no sample is lost, and the run can be repeated to the bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from evener.distributed.launch.rendezvous import Rendezvous
from evener.strategies.asynchronous.ledger import Contribution, ages, check_whole
from evener.tools.verify.replay import replay
from evener.training.fit import fit
from tests.distributed.processes import call, end, start_command
from tests.faults import tasks_asynchronous
from tests.faults.running import Fault, command, suffer

PROCESSES, STALENESS = 3, 3
SECTION = 10 * tasks_asynchronous.BATCH_SIZE


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "records.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "step"]


@pytest.mark.parametrize(
    ("deaths", "of_server", "servers", "epochs"),
    [
        pytest.param(1, 1, 1, 24, marks=pytest.mark.slow),
        pytest.param(1, 0, 2, 24, marks=pytest.mark.slow),
        pytest.param(25, 0, 1, 40, marks=pytest.mark.nightly),
    ],
)
def test_deaths_lose_and_double_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    deaths: int,
    of_server: int,
    servers: int,
    epochs: int,
) -> None:
    monkeypatch.setenv("EVENER__TESTS_FAULT", str(tmp_path))
    (tmp_path / "chaos.json").write_text(json.dumps({"ranks": [0, 1, 2]}))
    for rank, number in enumerate([of_server, deaths, deaths]):
        (tmp_path / f"deaths-{rank}").write_text(str(number))
    run = tmp_path / "run"
    found = call(
        fit,
        tasks_asynchronous.mortal,
        strategy="asynchronous",
        strategy_option=("sync_every=10", f"staleness={STALENESS}", f"servers={servers}"),
        processes=PROCESSES,
        device="cpu",
        epochs=epochs,
        run_dir=run,
        save_every="20steps" if of_server or servers > 1 else "1h",
        timeout_seconds=60.0,
        rendezvous=Rendezvous(max_restarts=2 * deaths + of_server + 2),
        show=False,
        timeout=600,
    )
    assert [(tmp_path / f"deaths-{rank}").read_text() for rank in range(PROCESSES)] == ["0"] * PROCESSES
    said = capfd.readouterr().err.count("was killed by SIGKILL")
    if of_server or servers > 1:  # one death ends all ranks, also one that is about to die by itself
        assert 1 <= said <= 2 * deaths + of_server
    else:
        assert said == 2 * deaths
    steps = steps_of(run)
    assert [step["step"] for step in steps] == list(range(found.summary.steps))
    assert sum(step["samples"] for step in steps) == epochs * tasks_asynchronous.SAMPLES
    for step in steps:
        merges = [[Contribution(*each) for each in held] for held in step["merges"]]
        check_whole(merges, SECTION)
        assert max(ages(merges)) <= STALENESS
        assert sum(step["shares"]) == SECTION
    repeated = replay(run, tasks_asynchronous.mortal)
    assert repeated.is_identical, repeated


@pytest.mark.slow
def test_a_signal_ends_a_section_early_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    task = "tests.faults.tasks_asynchronous:slow"
    options = ("--strategy", "asynchronous", "--strategy-option", "sync_every=20", "--steps", "30")
    words = (r"interrupted by SIGTERM at step 1", "saved")
    fault = Fault("SIGTERM", task, 143, words, 2, options, ((0.3, signal.SIGTERM),))
    suffer(fault, tmp_path)
    (first,) = steps_of(tmp_path / "run")
    assert 0 < first["samples"] < tasks_asynchronous.SAMPLES
    assert first["samples"] % tasks_asynchronous.BATCH_SIZE == 0
    ended = end(start_command(*command(fault, tmp_path), "--resume", "auto"), 100)
    assert ended.status == 0, ended.err
    steps = steps_of(tmp_path / "run")
    assert sum(step["samples"] for step in steps) == 2 * tasks_asynchronous.SAMPLES  # as without the signal
    assert [step["epoch"] for step in steps] == [0, 0, 1]
    for step in steps:
        check_whole([[Contribution(*each) for each in held] for held in step["merges"]], step["samples"])
    assert replay(tmp_path / "run", tasks_asynchronous.slow).is_identical
