"""The scripts of the page on other libraries: both sides of each difference run, and train the same where they can."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.cli.main import COMMANDS, parser
from evener.core.config.strategy_names import STRATEGIES
from evener.training.prepare.prepare import end

PAGE = (Path(__file__).parents[1] / "docs/migration.md").read_text()
SECTIONS = re.findall(r"^## From (.*?)\n+```diff\n(.*?)^```", PAGE, re.M | re.S)
LIBRARIES = {"Accelerate": "accelerate", "Fabric": "lightning.fabric", "Horovod": "horovod"}
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if re.match(r"\| (?!---)", line)
]
NAMED = [row for row in ROWS if len(row) == 5]
"""The rows of features by name: feature, Accelerate, Fabric, torchtitan, Evener."""
STAND_INS = {"N": "2", "X": "1", "N:M": "2:4", "data=R,shard=S": "data=2,shard=2"}
OTHER_ORDER = {"DistributedDataParallel", "Horovod"}
"""A DistributedSampler draws an order of its own."""


def side(difference: str, sign: str) -> str:
    """The program with the lines of ``sign`` and those of both."""
    kept = [line for line in difference.splitlines() if line[:1] in (sign, " ", "")]
    return "\n".join(line[1:] for line in kept) + "\n"


@pytest.fixture(autouse=True)
def one_rank_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    end()


def trained(program: str, path: Path, monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, Any]:
    """The weights that the program leaves in ``model``."""
    path.write_text(program)
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        found = runpy.run_path(str(path), run_name="__main__")
    if dist.is_initialized():
        end()
    weights: dict[str, Any] = {
        name.removeprefix("module."): value.clone() for name, value in found["model"].state_dict().items()
    }
    return weights


def test_the_page_has_each_library_once() -> None:
    names = [name for name, _ in SECTIONS]
    assert names == [
        "one device",
        "DataParallel",
        "DistributedDataParallel",
        *LIBRARIES,
    ], "each section begins with its program"


@pytest.mark.parametrize(("name", "difference"), SECTIONS, ids=[name for name, _ in SECTIONS])
def test_both_sides_run_and_train_the_same(
    name: str, difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = trained(side(difference, "+"), tmp_path / "after.py", monkeypatch)
    root = LIBRARIES.get(name, "").partition(".")[0]
    if root and importlib.util.find_spec(root) is None:
        return
    meeting = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    before = trained(
        side(difference, "-"),
        tmp_path / "before.py",
        monkeypatch,
        **(meeting if "Distributed" in name else {}),
    )
    assert after.keys() == before.keys()
    if name not in OTHER_ORDER:
        for key, value in before.items():
            torch.testing.assert_close(after[key], value, msg=lambda words, key=key: f"{key}: {words}")


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def check_command(text: str) -> None:
    """Raises unless the command line takes it: a command, or options of ``evener train``."""
    words = [STAND_INS.get(word, word) for word in shlex.split(text)]
    words = words[1:] if words[0] == "evener" else ["train", "digits", *words]
    if len(words) == 1:
        assert words[0] in {command.HELP.name for command in COMMANDS}, text
        return
    settings = vars(parser(words[0]).parse_args(words))
    assert settings.get("strategy") in (None, *STRATEGIES), text


def test_what_a_table_says_of_evener_is_there() -> None:
    texts = [text for row in ROWS for text in code(row[-1])]
    names = [name for text in texts for name in re.findall(r"\bevener\.\w+", text)]
    commands = [text for text in texts if text.startswith(("--", "evener "))]
    assert len(names) > 20
    assert len(commands) > 40
    for name in names:
        pkgutil.resolve_name(name)
    for text in commands:
        check_command(text)


def test_features_by_name_are_of_all_libraries() -> None:
    assert len(NAMED) > 50
    assert all(cell for row in NAMED for cell in row)


def test_names_of_accelerate_are_its_own() -> None:
    pytest.importorskip("accelerate")
    import accelerate.data_loader
    import accelerate.utils

    places = [accelerate, accelerate.Accelerator, accelerate.utils, accelerate.data_loader]
    classes = [accelerate.Accelerator, accelerate.DataLoaderConfiguration]
    classes += [accelerate.FullyShardedDataParallelPlugin]
    names = {name for place in places for name in dir(place)}
    names |= {name for cls in classes for name in inspect.signature(cls.__init__).parameters}
    for row in NAMED[3:]:
        for text in code(row[1]):
            if text.startswith("accelerate "):
                command = text.split()[1].partition("-")[0]
                assert importlib.util.find_spec(f"accelerate.commands.{command}"), text
            elif text not in ("-", "torchrun"):
                first = re.match(r"(?:accelerator\.|accelerate\.utils\.)?(\w+)", text)
                assert first, text
                assert first[1] in names, text
