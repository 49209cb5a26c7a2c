"""Calibrations as files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evener.balance.time_model import Line
from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError, DataError
from evener.strategies.ddp import Ddp
from evener.tools.plan.calibration import FORMAT, Calibration
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.costs import StepCosts
from evener.tools.plan.plan import ways_of

LINES = Line(1e-3, 2e-4), Line(1e-3, 4e-4)
COSTS = StepCosts(LINES, 2, rest=Line(1e-3, 0.0), spread=0.03, sizes=(16, 64))
CALIBRATION = Calibration(
    "digits",
    64,
    {
        Candidate(2, "ddp"): COSTS,
        Candidate(4, "tensor", ("plan=auto",), "data=2,tensor=2", 4, "blocks"): replace(
            COSTS, compute=LINES * 2
        ),
    },
    {"pipeline --processes 2": "one layer"},
    repeat_spread=0.07,
    devices=("a card", "another"),
    load=1.5,
    machine="a machine",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "plan.json"
    CALIBRATION.save(found)
    return found


def test_what_is_read_is_what_was_saved(path: Path) -> None:
    assert Calibration.read(path) == CALIBRATION
    ways = ways_of(Calibration.read(path), RunConfig(), 32)
    assert ways == ways_of(CALIBRATION, RunConfig(), 32)
    assert ways[0].costs.is_measured


def test_shares_of_another_number_of_ranks_leave_a_way_out() -> None:
    refused = dict[str, str]()
    alone = replace(
        CALIBRATION,
        costs=CALIBRATION.costs | {Candidate(1, "single"): replace(COSTS, compute=LINES[:1], parts=1)},
    )
    for settings, why in ({"balance": "3,1"}, "2 weights"), ({"max_shares": "-,4"}, "2 max_shares"):
        ways = ways_of(alone, RunConfig(**settings), 32, refused)  # type: ignore[arg-type]
        assert {way.candidate.ranks for way in ways} == {2, 4}
        assert ways[0].time.shares == ((24, 8) if "balance" in settings else (28, 4))
        assert why in refused["single --processes 1"]


def refuses(path: Path, text: str, reason: str) -> None:
    path.write_text(text)
    with pytest.raises(DataError, match=reason) as caught:
        Calibration.read(path)
    message = str(caught.value)
    assert f"{path} is no calibration of evener plan" in message
    assert f"Make one with evener plan TASK --save {path}" in message


def test_another_format_is_refused(path: Path) -> None:
    values = json.loads(path.read_text())
    refuses(path, json.dumps(values | {"format": "evener-calibration-0"}), f"not of the format {FORMAT}")
    refuses(path, "[1, 2]", f"not of the format {FORMAT}")


def test_half_a_file_is_refused(path: Path) -> None:
    text = path.read_text()
    refuses(path, text[: len(text) // 2], "line")
    refuses(path, "", "line")


@pytest.mark.parametrize("key", ["costs", "devices", "task"])
def test_a_missing_value_is_refused(key: str, path: Path) -> None:
    values = json.loads(path.read_text())
    refuses(path, json.dumps({name: value for name, value in values.items() if name != key}), key)


def test_a_value_of_the_wrong_kind_is_refused(path: Path) -> None:
    values = json.loads(path.read_text())
    values["costs"][0]["costs"]["compute"][0]["seconds_per_sample"] = "fast"
    refuses(path, json.dumps(values), r"costs\[0\].costs.compute\[0\].seconds_per_sample is a str")
    del values["costs"][0]["candidate"]
    refuses(path, json.dumps(values), "candidate")


@pytest.mark.parametrize("key", ["strategy", "ranks", "options"])
def test_null_in_place_of_a_value_is_refused(key: str, path: Path) -> None:
    values = json.loads(path.read_text())
    values["costs"][0]["candidate"][key] = None
    refuses(path, json.dumps(values), rf"costs\[0\].candidate.{key} is a NoneType")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no calibration of evener plan"):
        Calibration.read(tmp_path / "none.json")


def test_a_strategy_and_its_options_choose_among_the_ways() -> None:
    def found(**settings: Any) -> list[str]:
        return [way.candidate.strategy for way in ways_of(CALIBRATION, RunConfig(**settings), 32)]

    assert sorted(found()) == ["ddp", "tensor"]
    assert found(strategy="tensor") == found(mesh="data=2,tensor=2") == ["tensor"]
    assert found(strategy="tensor", strategy_option=("plan=up=colwise",)) == []
    assert found(processes=2) == ["ddp"]
    assert found(balance="2,1") == ["ddp", "tensor"]
    assert found(max_shares="8,-") == ["ddp", "tensor"]
    with pytest.raises(ConfigurationError, match="a plan is made of names"):
        found(strategy=Ddp())
