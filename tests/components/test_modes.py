"""Training begins in training mode, and modes are restored by ``train``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evener.components.model_trial import undisturbed
from evener.components.modes import begin_training, modes_kept


def body() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))


def test_a_model_that_comes_in_evaluation_mode_trains() -> None:
    model = nn.Sequential(body(), nn.Linear(2, 2)).eval()
    model[0].requires_grad_(False)
    begin_training(model)
    assert all(module.training for module in model.modules())


def test_a_trained_part_that_comes_in_evaluation_mode_trains() -> None:
    model = nn.Sequential(body().eval(), nn.Linear(2, 2))
    begin_training(model)
    assert all(module.training for module in model.modules())


def test_what_was_set_apart_stays_in_evaluation_mode() -> None:
    teacher, norm = body().eval().requires_grad_(False), nn.BatchNorm1d(2).eval()
    model = nn.Sequential(teacher, nn.Sequential(norm, nn.Linear(2, 2)))
    begin_training(model)
    apart = {*teacher.modules(), norm}
    assert {module for module in model.modules() if not module.training} == apart


class WithMergedWeights(nn.Module):
    """Adds a small weight to a large one for evaluation, and keeps a norm in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Parameter(torch.eye(2), False), nn.Parameter(torch.zeros(2, 2))
        self.norm, self.merged = nn.BatchNorm1d(2), False

    def train(self, mode: bool = True) -> WithMergedWeights:
        super().train(mode)
        self.norm.eval()
        if self.merged == mode:
            self.large.data += -self.small.data if mode else self.small.data
            self.merged = not mode
        return self


def test_a_model_is_asked_itself() -> None:
    model = nn.Sequential(WithMergedWeights(), nn.Linear(2, 2))
    begin_training(model)
    assert [module.training for module in model.modules()] == [True, True, False, True]


@pytest.mark.parametrize("kept", [modes_kept, undisturbed])
def test_weights_that_are_merged_for_evaluation_come_apart_again(kept: object) -> None:
    inner = WithMergedWeights()
    model = nn.Sequential(inner, nn.Dropout())
    begin_training(model)
    model[1].training = False
    with kept(model):  # type: ignore[operator]
        model.eval()
        assert inner.merged
    assert not inner.merged
    assert torch.allclose(inner.large, torch.eye(2), atol=1e-6)
    assert not inner.small.any()
    assert [module.training for module in model.modules()] == [True, True, False, False]


def test_a_part_may_train_in_a_model_that_does_not() -> None:
    model = nn.Sequential(WithMergedWeights(), nn.Dropout()).eval()
    model[0].train()
    with modes_kept(model):
        model.eval()
    assert not model.training
    assert not model[0].merged
    assert [module.training for module in model.modules()] == [False, True, False, False]
