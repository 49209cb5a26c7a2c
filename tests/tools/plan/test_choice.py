"""Training by a saved plan, and a run beside its prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import evener
from evener.balance.time_model import Line
from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError, DataError
from evener.tools.plan import Calibration, StepCosts, chosen_way, compared_step
from evener.tools.plan.calibration import counted_settings, this_machine
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.structure import structure_of
from evener.tools.plan.trials import WARM_STEPS
from tests.tools.estimate.test_estimate import small

SINGLE, DDP, SHARDED = Candidate(1, "single"), Candidate(2, "ddp"), Candidate(2, "sharded", ("zero=3",))


def costs(ranks: int, each: float, rest: float, *sizes: int) -> StepCosts:
    return StepCosts(
        (Line(0.0, each),) * ranks, ranks, rest=Line(rest, 0.0), spread=0.05, sizes=sizes or (64, 16)
    )


def calibration(**more: Any) -> Calibration:
    ways = {SINGLE: costs(1, 1e-3, 0.0), DDP: costs(2, 1e-3, 4e-3), SHARDED: costs(2, 1e-3, 8e-3)}
    usual = {"task": "small", "batch_size": 64, "costs": ways, "machine": this_machine()}
    return Calibration(**usual | {"settings": counted_settings(RunConfig())} | more)


def chosen(path: Path, config: RunConfig) -> Any:
    return chosen_way(path, config, lambda: small(name="small"))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    calibration().save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_the_fastest_way_is_taken(saved: Path) -> None:
    config, way = chosen(saved, RunConfig(epochs=3))
    assert (config.strategy, config.processes, config.epochs) == ("ddp", 2, 3)
    assert way.time.seconds == pytest.approx(32e-3 + 4e-3)
    config, _ = chosen(saved, RunConfig(batch_size=4))
    assert (config.strategy, config.processes) == ("single", 1)  # 4 ms of messages save 2 ms


def test_no_more_processes_are_taken_than_the_settings_allow(saved: Path) -> None:
    assert chosen(saved, RunConfig(processes=1))[0].strategy == "single"


def test_ranks_of_another_launcher_are_as_many_as_they_are(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert chosen(saved, RunConfig(batch_size=4))[0].strategy == "ddp"
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigurationError, match="on 3 ranks"):
        chosen(saved, RunConfig())


def test_ways_that_do_not_go_with_the_settings_are_passed_over(tmp_path: Path) -> None:
    """With tensor all ranks compute each sample, so there are no shares to learn."""
    tensor, quick = Candidate(2, "tensor"), replace(costs(2, 1e-4, 0.0), parts=1)
    calibration(costs={tensor: quick, DDP: costs(2, 1e-3, 4e-3)}).save(tmp_path / "plan.json")
    assert chosen(tmp_path / "plan.json", RunConfig())[0].strategy == "tensor"
    assert chosen(tmp_path / "plan.json", RunConfig(balance="auto"))[0].strategy == "ddp"
    assert chosen(tmp_path / "plan.json", RunConfig(balance="auto", processes=2))[0].strategy == "ddp"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": "ddp"}, "leave out strategy"),
        ({"mesh": "data=2"}, "leave out strategy"),
        ({"memory_limit": "1GB"}, "memory limits"),
        ({"batch_size": 65}, "none with more than 64"),
        ({"micro_batch": 8}, "micro_batch=None, and this is micro_batch=8"),
        ({"cuda_graphs": "auto"}, "cuda_graphs=off, and this is cuda_graphs=auto"),
        ({"precision": "bf16"}, "precision=None, and this is precision=bf16"),
    ],
)
def test_what_a_plan_cannot_choose_is_refused(saved: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        chosen(saved, RunConfig(**settings))


def test_a_plan_of_another_task_is_refused(saved: Path) -> None:
    with pytest.raises(ConfigurationError, match="of the task 'small', and this is 'another'"):
        chosen_way(saved, RunConfig(), lambda: small(name="another"))


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    calibration(structure=structure_of(small(name="small"))).save(tmp_path / "plan.json")
    assert chosen(tmp_path / "plan.json", RunConfig())[0].strategy == "ddp"
    averaged = replace(small(name="small"), average=evener.ema())
    with pytest.raises(ConfigurationError, match="with another model"):
        chosen_way(tmp_path / "plan.json", RunConfig(), lambda: averaged)


def test_a_plan_of_another_machine_is_refused(tmp_path: Path) -> None:
    calibration(machine="another, torch 1.0").save(tmp_path / "plan.json")
    with pytest.raises(ConfigurationError, match=r"another, torch 1\.0"):
        chosen(tmp_path / "plan.json", RunConfig())


# A run beside its prediction


def run_of(
    directory: Path, seconds: float, compute: tuple[float, float], steps: int = 10, **more: Any
) -> Path:
    """The files of a run, whose first steps are slow."""
    config = {"strategy": "auto", "strategy_option": [], "mesh": None, "micro_batch": None, "recompute": None}
    summary = {"task": "small", "world_size": 2, "batch_size": 64}
    (directory / "config.json").write_text(json.dumps(config | more.pop("config", {})))
    (directory / "summary.json").write_text(json.dumps(summary | more))
    records = [{"kind": "note", "step": 0, "words": "begins"}]
    for step in range(steps):
        slow = 50.0 if step <= WARM_STEPS else 1.0
        records.append(
            {
                "kind": "step",
                "step": step,
                "samples": 64,
                "shares": [32, 32],
                "seconds": seconds * slow,
                "compute_seconds": compute,
                "input_seconds": [0.0, 1e-4],
            }
        )
    (directory / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    return directory


def test_a_run_as_predicted(tmp_path: Path) -> None:
    found = compared_step(calibration(), run_of(tmp_path, 36e-3, (32e-3, 32e-3)))
    assert found.candidate == DDP
    assert found.is_within
    assert abs(found.difference) < 1e-9
    assert found.terms["communication"] == pytest.approx(36e-3 - 32e-3 - 1e-4)


def test_waiting_for_samples_is_a_part_of_the_measured_step(tmp_path: Path) -> None:
    """It is of the predicted one, and a record's step begins after it."""
    run = run_of(tmp_path, 36e-3, (32e-3, 32e-3))
    records = run / "records.jsonl"
    records.write_text(records.read_text().replace("[0.0, 0.0001]", "[0.02, 0.01]"))
    found = compared_step(calibration(), run)
    assert found.seconds == pytest.approx(56e-3)
    assert found.terms["input"] == pytest.approx(20e-3)
    assert sum(found.terms.values()) == pytest.approx(found.seconds)
    assert found.terms["communication"] == pytest.approx(4e-3)


def test_the_term_that_is_off_is_named(tmp_path: Path) -> None:
    found = compared_step(calibration(), run_of(tmp_path, 60e-3, (30e-3, 34e-3)))
    assert not found.is_within
    assert found.farthest == "communication"
    assert found.difference == pytest.approx(36 / 60 - 1)
    assert "communication" in found.words()
    found = compared_step(calibration(), run_of(tmp_path, 80e-3, (30e-3, 74e-3)))
    assert found.farthest in ("waiting", "compute")
    assert found.terms["waiting"] == pytest.approx(22e-3)


def test_a_run_with_slower_devices_than_there_are_is_not_compared(tmp_path: Path) -> None:
    run = run_of(tmp_path, 40e-3, (32e-3, 32e-3), config={"throttle": "1,0.5"})
    with pytest.raises(ConfigurationError, match="emulated slower devices"):
        compared_step(calibration(), run)


def test_a_run_that_was_profiled_is_not_compared(tmp_path: Path) -> None:
    run = run_of(tmp_path, 40e-3, (32e-3, 32e-3), config={"profile": 3})
    with pytest.raises(ConfigurationError, match="was profiled"):
        compared_step(calibration(), run)


def test_steps_before_a_resume_do_not_count(tmp_path: Path) -> None:
    """They may be of another way, and of another number of ranks."""
    run = run_of(tmp_path, 36e-3, (32e-3, 32e-3), samples_in_seconds=10 * 64)
    records = run / "records.jsonl"
    alone = {"kind": "step", "step": 0, "samples": 64, "shares": [64], "seconds": 90e-3}
    before = json.dumps(alone | {"compute_seconds": [90e-3], "input_seconds": [0.0]})
    records.write_text("\n".join([*[before] * 20, records.read_text()]))
    assert compared_step(calibration(), run).seconds == pytest.approx(36e-3)


def test_the_strategy_of_a_run_is_found_among_the_ways(tmp_path: Path) -> None:
    run = run_of(tmp_path, 40e-3, (32e-3, 32e-3), config={"strategy": "sharded"})
    assert compared_step(calibration(), run).candidate == SHARDED


@pytest.mark.parametrize(
    ("run", "kind", "words"),
    [
        ({"steps": WARM_STEPS + 3}, DataError, "2 whole steps"),
        ({"task": "another"}, ConfigurationError, "has trained 'another'"),
        ({"world_size": 3}, ConfigurationError, "does not have --strategy ddp --processes 3"),
        ({"config": {"strategy": "tensor"}}, ConfigurationError, "does not have --strategy tensor"),
    ],
)
def test_a_run_that_cannot_be_compared(tmp_path: Path, run: dict[str, Any], kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        compared_step(calibration(), run_of(tmp_path, 36e-3, (32e-3, 32e-3), **run))


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not the directory of a run"):
        compared_step(calibration(), tmp_path)
