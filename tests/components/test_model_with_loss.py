"""A rank without samples adds nothing to a step, whatever its placeholder's loss is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.components.model_with_loss import term_of
from evener.core.losses import SumLoss
from evener.data.batch import MicroBatch


def logarithm(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * 0).log().sum()


def root(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - outputs).sqrt().sum()


@pytest.mark.parametrize("worth", [logarithm, root])
def test_a_placeholder_s_own_loss_and_gradient_are_zero(worth: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    micro = MicroBatch(torch.ones(1, 4), torch.zeros(1), torch.zeros(1, dtype=torch.int64), weight=0)
    total = term_of(SumLoss(count=len, total=worth), model(micro.inputs), micro)
    total.backward()  # type: ignore[no-untyped-call]
    assert total.item() == 0
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))
