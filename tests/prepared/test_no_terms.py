"""A rank that has no term of a loss adds exactly nothing, whatever that loss would be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evener.prepared.silence import silent


@pytest.mark.parametrize("loss", [torch.sqrt, torch.log, torch.sum], ids=["steep", "infinite", "plain"])
def test_its_gradients_are_zeros(loss: Any) -> None:
    weight = torch.zeros(3, requires_grad=True)
    output = weight * 2
    place: Any = SimpleNamespace(outputs=[output])
    silent(loss(output.sum()), place).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0, 0.0, 0.0]


def test_it_goes_backward_where_nobody_waits() -> None:
    weight = torch.zeros(3, requires_grad=True)
    place: Any = SimpleNamespace(outputs=[])
    silent(weight.sum().sqrt(), place).backward()
    assert weight.grad is None
