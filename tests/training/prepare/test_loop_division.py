"""A division begins with what the loop has made before, and ends where a later call begins another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import evener
from tests.training.prepare.running import Loop, Weights, prepared
from tests.training.prepare.test_strategies import (
    TENSOR,
    ZERO1,
    ZERO3,
    Settings,
    adamw,
    check,
    found_of,
    loop_of,
    model,
)

DIVISIONS = {"zero1": ZERO1, "zero3": ZERO3, "tensor": TENSOR}
IN_PARTS: Settings = {"strategy": "sharded", "strategy_option": ("zero=1", "shard_sizes=1,3")}
WHOLE: Settings = {"strategy": "ddp"}


def epoch(loop: Loop) -> None:
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        loop.optimizer.step()


def prepare_again(loop: Loop, is_prepared: bool, **settings: Any) -> None:
    if is_prepared:
        given = loop.model, loop.optimizer, loop.loader, loop.loss
        loop.model, loop.optimizer, loop.loader, loop.loss = evener.prepare(*given, **settings)


def in_folds(is_prepared: bool) -> Weights:
    """Each fold replaces what the one before has left, and the last loss holds its graph until then."""
    for _ in range(2):
        loop = loop_of(is_prepared)
        for x, y in loop.loader:
            loop.optimizer.zero_grad()
            loss = loop.loss(loop.model(x), y)
            loss.backward()
            loop.optimizer.step()
    return found_of(loop, loss.item())


def after_steps_on_one_device(is_prepared: bool) -> Weights:
    """The optimizer has a state, as one that was loaded, and not of all parameters."""
    made = nn.Sequential(*model(), nn.Linear(3, 3).double())
    made[-1].requires_grad_(False)
    loop = Loop(False, adamw, made)
    epoch(loop)
    made[-1].requires_grad_(True)
    prepare_again(loop, is_prepared)
    epoch(loop)
    return found_of(loop)


def divided_again(is_prepared: bool) -> Weights:
    loop = loop_of(False)
    for settings in (IN_PARTS, WHOLE, {**IN_PARTS, "strategy_option": ("zero=1",)}, IN_PARTS):
        prepare_again(loop, is_prepared, **settings)
        epoch(loop)
    return found_of(loop)


@pytest.mark.parametrize("way", ["zero3", "tensor"])
def test_a_model_is_divided_after_another(ranks: Any, way: str) -> None:
    expected = in_folds(False)
    for found in ranks(2).run(prepared, in_folds, **DIVISIONS[way]):
        check(found, expected)


@pytest.mark.parametrize("way", DIVISIONS)
def test_a_state_from_before_is_divided(ranks: Any, way: str) -> None:
    expected = after_steps_on_one_device(False)
    for found in ranks(2).run(prepared, after_steps_on_one_device, **DIVISIONS[way]):
        check(found, expected)


def test_another_call_divides_updates_otherwise_or_not(ranks: Any) -> None:
    expected = divided_again(False)
    for found in ranks(2).run(prepared, divided_again):
        check(found, expected)


def in_trials(is_prepared: bool) -> Weights:
    """Batches go on in the order of one device, whatever numbers the ranks' models have drawn between."""
    loop = loop_of(False)
    for balance in ("equal", "3,1"):
        prepare_again(loop, is_prepared, balance=balance)
        epoch(loop)
        if is_prepared:
            torch.rand(1 + dist.get_rank())
    return found_of(loop)


def test_another_call_goes_on_with_the_order_of_one_device(ranks: Any) -> None:
    expected = in_trials(False)
    for found in ranks(2).run(prepared, in_trials):
        check(found, expected)
