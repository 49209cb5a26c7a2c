"""Loops that everybody knows, before and after: few lines changed, and the same training on uneven shares."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiers import ALWAYS, NIGHTLY, crossed
from tests.training.prepare.running import with_settings

LOOPS = ("images", "words", "sentences", "pictures", "tokens")
MOST_LINES = 6
Found = tuple[dict[str, Tensor], list[float]]


def outcome(name: str) -> Found:
    torch.manual_seed(5)
    weights, told = importlib.import_module(f"tests.training.prepare.loops.{name}").main()
    return {key: value.detach().clone() for key, value in weights.items()}, told


def prepared(name: str, balance: str) -> Found:
    with with_settings(balance=balance):
        return outcome(f"{name}_prepared")


@pytest.mark.parametrize("name", LOOPS)
def test_few_lines_are_changed(name: str) -> None:
    """Besides how far they are indented."""
    before, after = (
        [line.strip() for line in (Path(__file__).parent / "loops" / f"{which}.py").read_text().splitlines()]
        for which in (name, f"{name}_prepared")
    )
    diff = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    new = [line for line in diff if line.startswith("+") and line[1:].strip()]
    assert 0 < len(new) <= MOST_LINES, new
    assert sum(line.startswith("-") for line in diff) <= len(new)


@pytest.mark.parametrize(
    ("name", "balance"), crossed(LOOPS, ["3,1", "4,0,1"], lambda loop: (ALWAYS, NIGHTLY))
)
def test_it_is_the_training_of_one_device(ranks: Any, name: str, balance: str) -> None:
    weights, told = outcome(name)
    for own, own_told in ranks(len(balance.split(","))).run(prepared, name, balance):
        assert own.keys() == weights.keys()
        for key, value in weights.items():
            torch.testing.assert_close(own[key], value, rtol=1e-12, atol=1e-12, msg=key)
        assert own_told == pytest.approx(told, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", LOOPS)
def test_one_rank_is_one_device(name: str) -> None:
    weights, told = outcome(name)
    own, own_told = prepared(name, "equal")
    assert own_told == pytest.approx(told, rel=1e-13)
    for key, value in weights.items():
        torch.testing.assert_close(own[key], value, rtol=1e-13, atol=1e-13)
