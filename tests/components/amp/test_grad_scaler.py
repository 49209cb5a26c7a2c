"""The scale of the loss follows PyTorch's own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evener.components.amp import grad_scaler as scale
from evener.components.amp.grad_scaler import LEAST, LossScale


@given(st.lists(st.booleans(), max_size=40))
def test_it_is_that_of_grad_scaler(overflows: list[bool]) -> None:
    """Gradients that overflow in some steps, through PyTorch's scaler and through ours."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.0)
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    ours = LossScale()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale, "GROWS_AFTER", 3)
        for overflow in overflows:
            theirs.scale(weight.sum()).backward()
            weight.grad = torch.full((1,), math.inf if overflow else 1.0)
            theirs.step(optimizer)
            theirs.update()
            if not overflow:
                ours.went_well()
            elif not ours.overflowed():
                return  # where PyTorch goes on below a scale of 1
            assert ours.value == theirs.get_scale()


def test_below_one_it_is_no_matter_of_the_scale() -> None:
    ours = LossScale()
    while ours.overflowed():
        pass
    assert ours.value == LEAST
    assert not ours.overflowed()


def test_it_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "GROWS_AFTER", 2)
    before, after = LossScale(), LossScale()
    before.overflowed()
    before.went_well()
    after.load_state_dict(before.state_dict())
    assert after.value == before.value
    after.went_well()
    assert after.value == 2 * before.value
