"""Files of divided models are those of one device, and go from strategy to strategy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import evener
from evener.errors import ConfigurationError
from tests.training.prepare.running import Weights, prepared, with_settings
from tests.training.prepare.test_strategies import (
    TENSOR,
    ZERO1,
    ZERO2,
    ZERO3,
    adamw,
    check,
    found_of,
    loop_of,
    model,
)


def in_halves(is_prepared: bool, path: str, half: int) -> Weights:
    """Saves after three batches, or goes on from there."""
    loop = loop_of(is_prepared)
    parts = {"model": loop.model, "optimizer": loop.optimizer, "loader": loop.loader}
    if half:
        assert evener.load(path, **parts) == {"told": 3}
    for step, (x, y) in enumerate(loop.loader):
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        loop.optimizer.step()
        if step == 2 and half == 0 and is_prepared:
            evener.save(path, **parts, told=3)
            break
    return found_of(loop)


def test_a_file_goes_from_strategy_to_strategy(ranks: Any, tmp_path: Path) -> None:
    expected = in_halves(False, "", 0)
    ways = [ZERO3, TENSOR, ZERO1, {}, ZERO2]
    for number, (before, after) in enumerate(zip(ways, [*ways[1:], ZERO3], strict=True)):
        path = str(tmp_path / str(number))
        ranks(2).run(prepared, partial(in_halves, path=path, half=0), **before)
        for found in ranks(2).run(prepared, partial(in_halves, path=path, half=1), **after):
            check(found, expected)
    with with_settings():
        check(in_halves(True, path, 1), expected)


def test_the_file_is_that_of_one_device(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(prepared, partial(in_halves, path=str(tmp_path / "file"), half=0), **ZERO3)
    held = torch.load(tmp_path / "file", weights_only=True)["states"]
    plain = model()
    plain.load_state_dict(held["model"])
    adamw(plain).load_state_dict(held["optimizer"])


def refused_state(is_prepared: bool, path: str) -> tuple[str, int]:
    loop = loop_of(is_prepared)
    optimizer = torch.optim.AdamW(loop.model.parameters(), fused=True)
    parts = {"model": loop.model, "optimizer": optimizer}
    for x, y in loop.loader:
        optimizer.zero_grad()
        loop.backward(x, y)
        optimizer.step()
    evener.save(path, **parts)
    evener.load(path, **parts)
    optimizer.step()
    evener.barrier()
    if evener.is_main():
        found = torch.load(path, weights_only=True)
        found["states"]["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)
        torch.save(found, path)
    evener.barrier()
    with pytest.raises(ConfigurationError) as caught:
        evener.load(path, **parts)
    return str(caught.value), len(optimizer.state)


def test_the_state_of_divided_fused_updates_has_the_shapes_of_their_rows(ranks: Any, tmp_path: Path) -> None:
    """The kernel would write beyond the memory of a smaller one."""
    for words, entries in ranks(2).run(
        prepared, partial(refused_state, path=str(tmp_path / "file")), **ZERO1
    ):
        assert "exp_avg has the shape (3,) there" in words
        assert not entries
