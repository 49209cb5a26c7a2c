"""A rank that has no term of a loss adds exactly nothing, whatever that loss would be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evener.training.prepare import zero_loss
from evener.training.prepare.zero_loss import silent, silent_if_zero


@pytest.mark.parametrize("late", [False, True], ids=["prompt", "late"])
@pytest.mark.parametrize("loss", [torch.sqrt, torch.log, torch.sum], ids=["steep", "infinite", "plain"])
def test_its_gradients_are_zeros(monkeypatch: pytest.MonkeyPatch, loss: Any, late: bool) -> None:
    monkeypatch.setattr(zero_loss, "is_late", lambda device: late)
    weight = torch.zeros(3, requires_grad=True)
    output = weight * 2
    nothing = silent(loss(output.sum()))
    assert [each.tolist() for each in torch.autograd.grad(nothing, [weight, output])] == [[0.0] * 3] * 2


@pytest.mark.parametrize("late", [False, True], ids=["prompt", "late"])
def test_what_another_loss_brings_to_the_same_steps_stays(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    monkeypatch.setattr(zero_loss, "is_late", lambda device: late)
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


@pytest.mark.parametrize("late", [False, True], ids=["prompt", "late"])
def test_a_mean_over_nothing_sends_zeros_on(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    monkeypatch.setattr(zero_loss, "is_late", lambda device: late)
    weight = torch.ones(3, requires_grad=True)
    for count, expected in ((0.0, 0.0), (2.0, 1.0)):
        mask = torch.tensor([count / 2, count / 2, 0.0])
        mean = silent_if_zero(((weight * 2 * mask).sum() / mask.sum()).sqrt() ** 2)
        for _ in range(2):  # a graph may be gone through again
            weight.grad = None
            (mean * mask.sum().clamp(max=1)).backward(retain_graph=True)
            assert weight.grad is not None
            assert weight.grad.tolist() == pytest.approx([expected, expected, 0.0])
