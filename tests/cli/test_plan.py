"""What ``evener plan`` prints, and with which status it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from evener.cli.main import main

PLAN = ("plan", "digits", "--processes", "2", "--device", "cpu", "--memory")


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_plan_is_printed_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    """The table is that of docs/memory.md."""
    assert main([*PLAN, "--json", "plan.json", "--memory-limit", "1MiB,-"]) == 1
    shown = capsys.readouterr().out
    page = (Path(__file__).parents[2] / "docs/memory.md").read_text()
    assert shown.splitlines()[:-1] == page.partition("```text\n")[2].partition("\n```")[0].splitlines()
    assert shown.splitlines()[-1].startswith("rank 0 would need 6.09 MiB, and has 1 MiB")
    plan: dict[str, Any] = json.loads(Path("plan.json").read_text())
    assert plan["limits"] == [2**20, None]
    assert [rank["rank"] for rank in plan["ranks"]] == [0, 1]
    for rank in plan["ranks"]:
        assert sum(rank["at_peak"].values()) == rank["peak"]


def test_a_limit_that_is_enough_is_kept() -> None:
    assert main([*PLAN, "--memory-limit", "100MB"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*PLAN, "--memory-limit", "much"), "'much' is no size"),
        ((*PLAN, "--memory-limit", "1,2,3"), "3 limits for 2 ranks"),
        ((*PLAN, "--strategy", "pipeline"), "cut="),
        (("plan", "digits", "--device", "cpu", "--processes", "9999"), "ask for at most"),
        (("plan", "digits", "--device", "cpu", "--processes", "2:3"), "give one number here"),
        (
            ("plan", "digits", "--cluster", "a.toml", "--save", "b.json"),
            "--save would do nothing beside --clu",
        ),
        ((*PLAN, "--cluster", "a.toml"), "--memory would do nothing beside --cluster"),
        ((*PLAN, "--from", "a.json"), "--from would do nothing beside --memory"),
        ((*PLAN, "--save", "a.json"), "--save would do nothing beside --memory"),
        (("plan", "digits", "--explain", "run", "--from", "a", "--json", "b"), "--json would do nothing"),
        (("plan", "digits", "--budget", "nan"), "--budget must be above 0"),
        (("plan", "digits", "--top", "0"), "--top at least 1"),
        (("plan", "digits", "--explain", "run"), "--from"),
    ],
)
def test_what_a_user_gets_wrong(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_ways_are_tried_compared_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", "digits", "--processes", "2", "--device", "cpu", "--budget", "8")
    assert main([*arguments, "--json", "plan.json", "--memory-limit", "1GiB"]) == 0
    plan: dict[str, Any] = json.loads(Path("plan.json").read_text())["plan"]
    assert {way["ranks"] for way in plan["ways"]} == {1, 2}
    times = [way["seconds"]["p50"] for way in plan["ways"]]
    assert times == sorted(times)
    assert plan["ways"][0]["measured"]
    assert plan["ways"][0]["needed"] > 2**20
    assert plan["curve"][0]["speedup"] == 1.0
    assert plan["refused"].keys() >= {"context --processes 2", "experts --processes 2"}
    assert plan["ways"][0]["options"] in capsys.readouterr().out


_UNKNOWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener import Task


class Chooses(nn.Linear):
    def forward(self, x):
        return super().forward(x * (len(x[x.sum(1) > 0]) > 0))


def task():
    return Task(
        model=lambda: Chooses(4, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=TensorDataset(torch.rand(64, 4), torch.arange(64) % 2),
        batch_size=8,
    )
"""


@pytest.mark.slow
def test_ways_are_compared_though_memory_cannot_be_known(capsys: pytest.CaptureFixture[str]) -> None:
    Path("chooses.py").write_text(_UNKNOWN)
    arguments = ("plan", "chooses:task", "--device", "cpu", "--processes", "1")
    assert main([*arguments, "--memory"]) == 2
    assert main([*arguments, "--budget", "4", "--json", "plan.json"]) == 0
    (way,) = json.loads(Path("plan.json").read_text())["plan"]["ways"]
    assert way["needed"] is None
    assert "cannot be known" in capsys.readouterr().out
