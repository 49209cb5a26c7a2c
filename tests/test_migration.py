"""The scripts of the page on other libraries: both sides of each difference run, and train the same where they can."""

from __future__ import annotations

import importlib.util
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.training.prepare.prepare import end

PAGE = (Path(__file__).parents[1] / "docs/migration.md").read_text()
SECTIONS = re.findall(r"^## From (.*?)\n+```diff\n(.*?)^```", PAGE, re.M | re.S)
LIBRARIES = {"Accelerate": "accelerate", "Fabric": "lightning.fabric", "Horovod": "horovod"}
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
