"""A name of the user's own that cannot be used says why, whatever it names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.balance.registry import make_balancer
from evener.cli.main import main
from evener.collectives import registry
from evener.core.plugins import find
from evener.core.task.task import resolve
from evener.errors import ConfigurationError, DataError, ShareError, TaskError
from evener.strategies import Ddp, Layout, Strategy, StrategySettings
from evener.strategies.registry import strategy_called

BROKEN = {
    "missing_need": (
        "\nimport something_that_is_missing\n",
        r"missing_need\.py:2.*something_that_is_missing",
    ),
    "missing_name": ("from json import nothing_of_the_kind\n", r"missing_name\.py:1.*nothing_of_the_kind"),
    "mistaken": ("broken = 1 / 0\n", r"mistaken\.py:1 with ZeroDivisionError: division by zero"),
    "misspelt": ("def f(:\n", "importing module misspelt failed with SyntaxError: invalid syntax"),
    "leaving": ("raise SystemExit(2)\n", r"leaving\.py:1 with SystemExit: 2"),
    "lacking": ("import lacking.part\n", r"there is no module 'lacking\.part'|lacking\.py:1"),
}
DOORS: dict[str, tuple[Callable[[str], Any], type[ConfigurationError]]] = {
    "task": (resolve, TaskError),
    "balancer": (lambda name: make_balancer(name, 2), ShareError),
    "all-reduce": (registry.find, ConfigurationError),
    "strategy": (strategy_called, ConfigurationError),
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


class Half(Strategy):
    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        return Layout({"data": world_size})


class WithArguments(Ddp):
    def __init__(self, every: int) -> None:
        self.every = every


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Half", "it lacks stepper, synchronizer"),
        ("WithArguments", "made without arguments: it needs 'every'"),
    ],
)
def test_a_strategy_says_all_and_is_made_of_nothing(name: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        strategy_called(f"tests.core.test_plugins:{name}")


@pytest.mark.parametrize("module", BROKEN)
@pytest.mark.parametrize("what", DOORS)
def test_a_module_that_cannot_be_imported_shows_its_own_error(
    what: str, module: str, directory: Path
) -> None:
    source, words = BROKEN[module]
    (directory / f"{module}.py").write_text(source)
    door, kind = DOORS[what]
    with pytest.raises(kind, match=f"^{what} '{module}:Thing'.*{words}") as caught:
        door(f"{module}:Thing")
    assert caught.value.__cause__ is not None
    assert f"no {what} is called" not in str(caught.value)


def test_a_module_that_one_of_python_hides_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    (directory / "random.py").write_text("def task(): ...\n")
    with pytest.raises(
        ConfigurationError,
        match=r"module random has no task; .* random\.py in the working directory is hidden by the module of the same "
        r"name in /.*/random\.py: rename yours$",
    ):
        find("random:task", "task", "function", callable)


def test_an_error_of_eveners_own_is_left_as_it_is(directory: Path) -> None:
    source = "from evener.errors import DataError\nraise DataError('no such file')\n"
    (directory / "reads_data.py").write_text(source)
    with pytest.raises(DataError, match=r"^no such file$"):
        find("reads_data:task", "task", "function", callable)


def test_candidates_are_the_modules_own_and_names_may_be_nested(directory: Path) -> None:
    source = "from pathlib import Path\nclass Own:\n    def make(self): ...\n_hidden = print\nnumber = 3\n"
    (directory / "plugin.py").write_text(source)
    assert find("plugin:Own.make", "thing", "function", callable).__qualname__ == "Own.make"
    with pytest.raises(ConfigurationError, match=r"module plugin has no Onw; of this kind it has Own$"):
        find("plugin:Onw", "thing", "function", callable)
    with pytest.raises(
        ConfigurationError, match=r"Own of module plugin is the class Own, not a list; it has"
    ):
        find("plugin:Own", "thing", "list", lambda value: isinstance(value, list))


def test_the_bench_finds_what_lies_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    (tmp_path / "of_the_working_directory.py").write_text("make = 3\n")
    arguments = ["bench", "allreduce", "--processes", "2", "--device", "cpu", "--sizes", "4K"]
    assert main([*arguments, "--algorithms", "of_the_working_directory:make"]) == 2
    assert "make of module of_the_working_directory is of type int" in capsys.readouterr().err
