"""Plans that earlier commands kept, which runs find by themselves."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import evener
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.errors import ConfigurationError, DataError
from evener.tools.plan import Calibration, cached_way, keep
from evener.tools.plan.calibration import counted_settings
from evener.tools.plan.structure import structure_of
from tests.tools.plan.test_choice import DDP, SHARDED, SINGLE, calibration, costs

CONFIG = RunConfig(device="cpu", processes=2)
NAME = "kept_tasks:task"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source = f"from {__name__} import made\n\n\ndef task(width=8):\n    return made(width)\n"
    (tmp_path / "kept_tasks.py").write_text(source)


def made(width: int = 8, **fields: Any) -> Task:
    data = TensorDataset(torch.zeros(128, 4), torch.zeros(128, 2))
    usual: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2)),
        "loss": nn.MSELoss(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "train": data,
        "name": "small",
    }
    return Task(**usual | fields)


def plan(**more: Any) -> Calibration:
    return calibration(settings=counted_settings(CONFIG), structure=structure_of(made()), **more)


def kept(**more: Any) -> Path:
    path = keep(plan(**more), NAME, CONFIG)
    assert isinstance(path, Path)
    return path


def test_without_a_plan_nothing_is_built() -> None:
    assert cached_way("no.such:task", CONFIG) is None
    kept()
    assert cached_way("no.such:task", CONFIG) is None


def test_a_run_finds_the_plan_that_was_kept_for_it(tmp_path: Path) -> None:
    path = kept()
    assert path.is_relative_to(tmp_path / "cache" / "evener" / "plans")
    found = cached_way(NAME, CONFIG)
    assert found is not None
    config, way, file = found
    assert (config.strategy, config.processes, file) == ("ddp", 2, path)
    assert way.candidate == DDP
    assert Calibration.read(path).made


def test_an_explicit_number_of_processes_stays() -> None:
    """One rank would be faster, for its updates cost nothing."""
    slow = {SINGLE: costs(1, 1e-3, 0.0), DDP: costs(2, 1e-3, 90e-3), SHARDED: costs(2, 1e-3, 80e-3)}
    kept(costs=slow)
    found = cached_way(NAME, CONFIG)
    assert found is not None
    assert found[1].candidate == SHARDED


def test_a_plan_for_fewer_devices_is_not_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    kept()
    assert cached_way(NAME, CONFIG.replace(processes=3)) is None
    monkeypatch.setattr("evener.tools.plan.cache.default_processes", lambda _: 4)
    assert cached_way(NAME, CONFIG.replace(processes=None)) is None
    monkeypatch.setattr("evener.tools.plan.cache.default_processes", lambda _: 2)
    assert cached_way(NAME, CONFIG.replace(processes=None)) is not None


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 32},
        {"precision": "bf16"},
        {"micro_batch": 8},
        {"strategy": "ddp"},
        {"mesh": "data=2"},
        {"allreduce": "ring"},
        {"memory_limit": "1GB"},
        {"processes": "1:2"},
    ],
)
def test_other_settings_have_another_plan(settings: dict[str, Any]) -> None:
    kept()
    assert cached_way(NAME, CONFIG.replace(**settings)) is None


def test_other_options_and_directories_are_other_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept()
    assert cached_way(NAME, CONFIG, {"width": 9}) is None
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cached_way(NAME, CONFIG) is None


def test_a_task_that_has_changed_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    kept()
    wider = made(16)
    monkeypatch.setattr("kept_tasks.made", lambda _: wider)
    assert cached_way(NAME, CONFIG) is None


def test_ranks_of_another_launcher_take_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    kept()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert cached_way(NAME, CONFIG) is None


def test_trials_on_a_busy_machine_are_not_kept() -> None:
    assert keep(plan(load=1000.0), NAME, CONFIG) == "the machine was busy"
    assert keep(plan(costs={}), NAME, CONFIG) == "no way was tried"
    assert keep(plan(), NAME, CONFIG.replace(strategy="ddp")) == "the settings choose how to train"


def test_trials_of_another_model_are_not_kept() -> None:
    assert "of another model" in str(keep(plan(), NAME, CONFIG, {"width": 16}))
    assert cached_way(NAME, CONFIG, {"width": 16}) is None


def test_a_directory_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no directory")
    why = keep(plan(), NAME, CONFIG)
    assert isinstance(why, str)
    assert "directory" in why


# Files that cannot be used


def edited(path: Path, **values: Any) -> None:
    found = json.loads(path.read_text())
    found["costs"][1]["costs"] |= values.pop("of_costs", {})
    found["costs"][1]["candidate"] |= values.pop("candidate", {})
    path.write_text(json.dumps(found | values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"format": "another"}, "not of the format"),
        ({"of_costs": {"update": float("nan")}}, "update is not finite"),
        ({"of_costs": {"input": {"overhead_seconds": -1.0, "seconds_per_sample": 0.0}}}, "negative"),
        ({"of_costs": {"sizes": [0]}}, "of batches of"),
        ({"costs": []}, "has no way to train"),
        ({"settings": []}, "settings is a list"),
        ({"of_costs": {"parts": 0}}, "not those of 2 ranks"),
        ({"of_costs": {"compute": []}}, "not those of 2 ranks"),
        ({"candidate": {"strategy": "os:system"}}, "parts that Evener does not have: os:system"),
        ({"candidate": {"allreduce": "os:system"}}, "parts that Evener does not have"),
    ],
)
def test_a_file_that_was_edited_is_refused(values: dict[str, Any], words: str) -> None:
    edited(kept(), **values)
    with pytest.raises(DataError, match=words):
        cached_way(NAME, CONFIG)


def test_a_file_that_is_cut_short_is_refused() -> None:
    path = kept()
    path.write_text(path.read_text()[:100])
    with pytest.raises(DataError, match="is no plan that can be used"):
        cached_way(NAME, CONFIG)


def test_files_of_others_and_links_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kept()
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(DataError, match="no file of yours"):
        cached_way(NAME, CONFIG)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    path.rename(tmp_path / "plan.json")
    path.symlink_to(tmp_path / "plan.json")
    with pytest.raises(DataError, match="no file of yours"):
        cached_way(NAME, CONFIG)


def test_a_plan_of_smaller_batches_could_run_out_of_memory() -> None:
    small = {way: replace(each, sizes=(16,)) for way, each in calibration().costs.items()}
    kept(costs=small)
    with pytest.raises(ConfigurationError, match="none with more than 16"):
        cached_way(NAME, CONFIG)


# What a task builds


def test_values_and_rates_do_not_change_what_a_task_builds() -> None:
    other = made(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    assert structure_of(made()) == structure_of(other)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))},
        {"model": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2).requires_grad_(False))},
        {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)},
        {"optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.1)},
        {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, nesterov=True, momentum=0.9)},
        {"loss": nn.L1Loss()},
        {"average": evener.ema()},
        {"penalty": lambda model: model[0].weight.square().sum()},
        {"train": TensorDataset(torch.zeros(64, 4), torch.zeros(64, 2))},
        {"train": TensorDataset(torch.zeros(128, 3, 4), torch.zeros(128, 3, 2))},
    ],
)
def test_what_changes_times_or_memory_is_another_structure(fields: dict[str, Any]) -> None:
    assert structure_of(made()) != structure_of(made(**fields))


def test_a_model_that_needs_numbers_has_a_structure_too() -> None:
    def model() -> nn.Module:
        assert torch.zeros(1).item() == 0.0
        return nn.Linear(4, 2)

    assert structure_of(made(model=model)) == structure_of(made(model=lambda: nn.Linear(4, 2)))
