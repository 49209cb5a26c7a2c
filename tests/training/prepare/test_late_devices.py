"""Loops on a device that runs behind the host, where numbers of a step are known later. Played by a CPU here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import evener
from evener.components import gradients
from evener.errors import DivergenceError
from evener.hardware import async_read
from evener.training.prepare import soundness
from tests.training.prepare import test_prepare, test_strategies
from tests.training.prepare.running import Loop, Weights, model_of, prepared, rows, sgd
from tests.training.prepare.test_strategies import TENSOR, ZERO3

LOOPS = (
    test_prepare.plainly,
    test_prepare.accumulating,
    test_prepare.two_losses_of_a_batch,
    test_strategies.clipping,
)


def late(loop: Callable[..., Any], *given: Any, **settings: Any) -> Any:
    behind: Any = lambda device: True  # noqa: E731
    with (
        patch.object(soundness, "is_late", behind),
        patch.object(gradients, "is_late", behind),
        patch.object(async_read, "is_late", behind),
    ):
        return prepared(loop, *given, **settings)


@pytest.mark.parametrize("loop", LOOPS, ids=[each.__name__ for each in LOOPS])
def test_it_is_the_loop_of_one_device(ranks: Any, loop: Callable[[bool], Weights]) -> None:
    expected = loop(False)
    for found in ranks(2).run(late, loop, balance="3,1"):
        test_strategies.check(found, expected)


def timed(_: bool) -> list[tuple[int, int]]:
    """The steps whose times the balancer is told, and how many were drawn until then."""
    torch.manual_seed(4)
    model, loader, loss = evener.prepare(model_of(), DataLoader(rows(), batch_size=6), F.cross_entropy)
    told, taken = list[tuple[int, int]](), 0
    loader.balancer.observe = lambda step, shares, seconds: told.append((step, taken))
    for _ in range(2):
        for x, y in loader:
            loss(model(x), y).backward()
            taken += 1
    return told


def test_times_of_a_batch_are_told_with_the_next_one(ranks: Any) -> None:
    for told in ranks(2).run(late, timed):
        assert told == [(step, step + 2) for step in range(9)]
    for told in ranks(2).run(prepared, timed):
        assert told == [(step, step + 1) for step in range(10)]


def unsound(_: bool, then: str) -> list[str]:
    """What is told of gradients that are not finite in the second step."""
    loop, said = Loop(True, sgd), list[str]()
    try:
        for step, (x, y) in enumerate(loop.loader):
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            if step == 1:
                dict(loop.model.named_parameters())["2.weight"].grad.mul_(torch.inf)
            said.append(f"step {step}")
            loop.optimizer.step()
            if step == 1 and then == "save":
                evener.save("/dev/null/nothing", model=loop.model)
    except DivergenceError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize("settings", [{}, TENSOR, ZERO3], ids=["ddp", "tensor", "zero3"])
@pytest.mark.parametrize("then", ["save", "go on"])
def test_unsound_gradients_are_told_before_they_are_saved(ranks: Any, settings: Any, then: str) -> None:
    words = "the gradient of 2.weight is not finite before the update of step 1: the run stops here"
    for said in ranks(2).run(late, unsound, then, **settings):
        assert said[:-1] == ["step 0", "step 1"]
        assert words in said[-1] or (then == "go on" and "the loss is nan in step 2" in said[-1])
