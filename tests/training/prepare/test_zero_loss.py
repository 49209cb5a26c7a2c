"""A rank that has no term of a loss adds exactly nothing, whatever that loss would be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evener.training.prepare.zero_loss import silent


@pytest.mark.parametrize("loss", [torch.sqrt, torch.log, torch.sum], ids=["steep", "infinite", "plain"])
def test_its_gradients_are_zeros(loss: Any) -> None:
    weight = torch.zeros(3, requires_grad=True)
    output = weight * 2
    nothing = silent(loss(output.sum()))
    assert [each.tolist() for each in torch.autograd.grad(nothing, [weight, output])] == [[0.0] * 3] * 2


def test_what_another_loss_brings_to_the_same_steps_stays() -> None:
    weight = torch.ones(3, requires_grad=True)
    output = weight * 2
    (silent((output - 2).sum().sqrt()) + (3 * output).sum()).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [6.0] * 3


def test_without_a_graph_it_has_none() -> None:
    assert not silent(torch.tensor(2.0)).requires_grad
    weight = torch.zeros((), requires_grad=True)
    silent(weight).backward()
    assert weight.grad == 0
