"""A model that writes to its weights in forward: lost where a rank has the whole weight for the pass alone."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.components.sharded_tensor.local import changeable
from evener.core.config.run_config import RunConfig
from evener.errors import TaskError
from evener.strategies.sharded.sharded import Sharded
from evener.strategies.sharded.write_check import refuse_writes
from evener.training.engine import Engine
from tests.tasks import _task


class Clamped(nn.Module):
    def __init__(self, passes: int) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(6, 3), passes

    def forward(self, x: Tensor) -> Tensor:
        self.passes -= self.training
        if self.passes == 0:
            with torch.no_grad():
                self.layer.weight.clamp_(-0.1, 0.1)
        out: Tensor = self.layer(x)
        return out


def said(zero: int, passes: int) -> str:
    config = RunConfig(strategy=Sharded(zero=zero), device="cpu", steps=3)
    with Engine(_task(model=lambda: Clamped(passes)), config) as engine:
        try:
            engine.evaluate()
            for batch in engine.batches():
                engine.step(batch)
        except TaskError as error:
            return str(error)
        hooks = [
            hook.__qualname__
            for hook in engine.model._forward_hooks.values()
            if hasattr(hook, "__qualname__")
        ]
        assert not any("refuse_writes" in name for name in hooks)
    return ""


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_writes_are_refused_by_name(ranks: Any, zero: int) -> None:
    for told in ranks(2).run(said, zero, 1):
        assert "writes to its weight layer.weight in forward" in told


@pytest.mark.parametrize("zero", [2, 3])
def test_who_does_not_write_is_looked_at_once(ranks: Any, zero: int) -> None:
    assert ranks(2).run(said, zero, -1) == ["", ""]


class Tried(nn.Linear):
    """Other weights for the time of a trial, within its first pass."""

    def forward(self, x: Tensor) -> Tensor:
        with ExitStack() as stack, torch.no_grad():
            for parameter in self.parameters():
                changeable(parameter, stack).add_(1.0)
        return super().forward(x)


def test_a_trial_is_no_write() -> None:
    layer = Tried(2, 2)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    refuse_writes(layer, layer.named_parameters, "any")
    layer(torch.ones(1, 2)).sum().backward()
    assert all(map(torch.equal, layer.parameters(), before))
