from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest

from evener.core.config.run_config import RunConfig
from evener.core.config.strategy_names import STRATEGIES
from evener.errors import ConfigurationError
from evener.strategies import Strategy
from evener.strategies.registry import strategy_called


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("batch_size", 2.5),
        ("batch_size", True),
        ("epochs", 0),
        ("steps", -1),
        ("micro_batch", 0),
        ("processes", 0),
        ("workers", -1),
        ("workers", "many"),
        ("workers", "auto"),
        ("workers", "3"),
        ("workers", 1.5),
        ("seed", -1),
        ("evaluate_every", -1),
        ("clip_norm", 0.0),
        ("clip_norm", float("nan")),
        ("timeout_seconds", float("inf")),
        ("timeout_seconds", 1e15),
        ("grace_seconds", 2e9),
        ("batch_size", 10**20),
        ("dtype", "int8"),
        ("device", "cuda:1"),
    ],
)
def test_values_that_cannot_work_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name} is {value!r}; it must be"):
        RunConfig(**{name: value})
    with pytest.raises(ConfigurationError, match=name):
        RunConfig().replace(**{name: value})


def test_a_name_that_is_no_setting_gets_the_nearest_or_the_list() -> None:
    with pytest.raises(ConfigurationError, match="no setting is called epoch; did you mean epochs"):
        RunConfig().replace(epoch=3)
    with pytest.raises(ConfigurationError, match="no setting is called epoch; did you mean epochs"):
        RunConfig(epoch=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="no setting is called lr; there are: batch_size, "):
        RunConfig().replace(lr=0.1, steps=2)


def test_numbers_may_come_as_text_where_a_word_is_possible() -> None:
    assert RunConfig(micro_batch="8").micro_batch == 8
    assert RunConfig(micro_batch="auto").micro_batch == "auto"


def test_a_configuration_is_frozen_and_replaced() -> None:
    config = RunConfig(steps=3)
    changed = config.replace(batch_size=8)
    assert (config.batch_size, changed.batch_size, changed.steps) == (None, 8, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 4  # type: ignore[misc]


def test_json_holds_a_configuration() -> None:
    values = json.loads(json.dumps(RunConfig(run_dir=Path("runs/x"), batch_size=8).as_dict()))
    assert values["run_dir"] == "runs/x"
    assert values.keys() == {entry.name for entry in dataclasses.fields(RunConfig)}


def test_every_setting_is_explained() -> None:
    assert all(entry.metadata["help"] for entry in dataclasses.fields(RunConfig))


def test_a_directory_may_be_named_by_a_string() -> None:
    assert RunConfig(run_dir="runs/one").run_dir == Path("runs/one")  # type: ignore[arg-type]


def test_an_empty_directory_is_refused() -> None:
    for name in ("run_dir", "resume"):
        with pytest.raises(ConfigurationError, match=f"{name} is empty"):
            RunConfig(**{name: ""})


def test_the_help_names_every_strategy() -> None:
    help = RunConfig.__dataclass_fields__["strategy"].metadata["help"]
    assert f"auto, {', '.join(STRATEGIES)}, or package.module:Class" in help
    for name, place in STRATEGIES.items():
        assert strategy_called(name).label == name
        assert issubclass(resolve_name(place), Strategy)


def test_a_checkpoint_may_hold_the_settings() -> None:
    plain = (bool, int, float, str, list, type(None))
    settings: Any = {"clip_norm": np.float64(2.0), "bucket_mb": np.float32(0.5), "steps": np.int64(3)}
    kept = RunConfig(**settings).as_dict()
    assert (kept["bucket_mb"], kept["steps"]) == (0.5, 3)
    assert [name for name, value in kept.items() if type(value) not in plain] == []
    assert (kept["timeout_seconds"], kept["clip_norm"]) == (300.0, 2.0)
