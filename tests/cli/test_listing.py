"""``evener list``, and short names that other packages give by entry points."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from evener.balance.registry import BALANCERS, decides, fixed_weights, make_balancer
from evener.cli.listing import KINDS
from evener.cli.main import main
from evener.collectives.registry import ALL_REDUCES, find
from evener.core.config.strategy_names import STRATEGIES
from evener.core.plugins import installed, suggestion
from evener.core.task.task import resolve
from evener.errors import ConfigurationError, TaskError
from evener.strategies.registry import strategies_called
from evener.training.builtin_tasks import BUILT_IN

POINTS = """
[evener.tasks]
planned = tests.tasks:plain
digits = elsewhere:task

[evener.strategies]
mine = evener.strategies.ddp:Ddp

[evener.balancers]
half = tests.balancers:Even

[evener.all_reduces]
quick = evener.collectives.native:Native
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with entry points."""
    place = tmp_path / "further-1.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: further\nVersion: 1.0\n")
    (place / "entry_points.txt").write_text(POINTS)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return place


def listed(capsys: pytest.CaptureFixture[str], *what: str) -> list[str]:
    assert main(["list", *what]) == 0
    return capsys.readouterr().out.splitlines()


def test_all_names_that_there_are_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    known = {
        "tasks": BUILT_IN,
        "strategies": ["auto", *STRATEGIES],
        "all-reduces": ALL_REDUCES,
        "balancers": BALANCERS,
    }
    assert known.keys() == KINDS.keys()
    for what, names in known.items():
        _, *lines = listed(capsys, what)
        assert {line.split()[0] for line in lines} == {*names}
        assert all(len(line.split()) > 2 and ":" not in line.split()[1] for line in lines), "words, no paths"
    assert [line.split()[0] for line in listed(capsys) if line and not line.startswith(" ")] == list(KINDS)


def test_names_of_other_packages_are_listed(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = listed(capsys, "tasks")
    assert "  planned          tests.tasks:plain  (further)" in lines
    assert "  digits           elsewhere:task  (further, hidden by Evener's own)" in lines


def test_names_of_other_packages_are_found(package: Path) -> None:
    assert resolve("planned")().train is not None
    assert [type(strategy).__name__ for strategy in strategies_called("mine,ddp")] == ["Ddp", "Ddp"]
    assert find("quick") is not None
    assert decides("half")
    assert fixed_weights("half", 2) is None
    assert make_balancer("half", 2) is not None
    assert resolve("digits", BUILT_IN)().name == "digits"


def test_a_name_that_nobody_gives_comes_with_the_nearest(package: Path) -> None:
    with pytest.raises(TaskError, match=r"known are digits, .*planned.*Did you mean planned\?$"):
        resolve("plannd", BUILT_IN)


def test_a_name_of_two_packages_is_refused(package: Path) -> None:
    other = package.with_name("second-1.0.dist-info")
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: second\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[evener.tasks]\nplanned = tests.tasks:penalty\n")
    with pytest.raises(ConfigurationError, match=r"'planned' is both .* of two packages"):
        installed("task")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("base.py", ". Did you mean base:task?"),
        ("here/base.py", ". Did you mean here.base:task?"),
        ("digit", ". Did you mean digits?"),
        ("something", ""),
    ],
)
def test_what_may_have_been_meant(name: str, words: str) -> None:
    assert suggestion(name, ["digits", "mnist"]) == words
