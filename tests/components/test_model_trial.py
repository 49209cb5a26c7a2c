"""A model runs in training mode for a trial, without dropout, and is afterwards as before."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from evener.components.model_trial import state_kept, training_without_dropout, undisturbed


class Dropping(nn.Module):
    """Every way to drop that PyTorch has."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.frozen = nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
        self.recurrent = nn.GRU(4, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.module(x)
        x = F.dropout(x, 0.5, self.training) + F.alpha_dropout(input=x, p=0.5, training=self.training)
        x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.5)[:, 0]
        x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], None, 0.5)[:, 0]
        x = x + self.attention(x, x, x)[0] + torch.dropout(x, 0.5, True)
        found: Tensor = self.recurrent(x)[0]
        return found


def test_nothing_is_dropped_and_nothing_drawn() -> None:
    torch.manual_seed(0)
    model, x = Dropping(), torch.randn(3, 5, 4)
    model.frozen.eval()
    before = torch.get_rng_state()
    with training_without_dropout(model, [m for m in model.modules() if m.training]):
        assert model.training
        assert not model.frozen.training
        first, second = model(x), model(x)
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())
    assert model.module.training
    assert model.attention.dropout == model.recurrent.dropout == 0.5
    assert not torch.equal(model(x), model(x))


class Keeping(nn.Module):
    """Leaves traces of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.inputs, self.named = 0, [1.0], {"a": 1}
        self.weight, self.frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), False)
        self.register_buffer("seen", torch.zeros(3))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.inputs.append(2.0)
        self.named["b"] = 2
        self.last = x
        self.seen = self.seen + 1
        with torch.no_grad():
            self.frozen[1:].mul_(2)
            torch._foreach_add_([self.weight.data], 1.0)
        return x * self.weight * self.frozen


def test_what_a_forward_leaves_behind_is_taken_back() -> None:
    model = Keeping()
    held: Any = model.inputs, model.named, model.seen
    with state_kept(model):
        model(torch.ones(3))
        assert model.calls == 1
    assert (model.calls, held[0], held[1]) == (0, [1.0], {"a": 1})
    assert model.inputs is held[0]
    assert model.seen is held[2]
    assert not hasattr(model, "last")
    for tensor, value in ((model.weight, 1.0), (model.frozen, 1.0), (model.seen, 0.0)):
        assert torch.equal(tensor.detach(), torch.full((3,), value))


class RegistersOnce(nn.Module):
    """Registers a hook in its first forward pass, and notes that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.is_ready = nn.Linear(2, 2), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            self.layer.register_forward_hook(lambda module, inputs, outputs: outputs + 1)
            self.is_ready = True
        found: Tensor = self.layer(x)
        return found


def test_a_hook_that_a_first_pass_registers_is_registered_once() -> None:
    torch.manual_seed(0)
    model, x = RegistersOnce(), torch.randn(3, 2)
    with state_kept(model):
        model(x)
    assert not model.layer._forward_hooks
    torch.testing.assert_close(model(x), x @ model.layer.weight.T + model.layer.bias + 1)


@pytest.mark.parametrize(("home", "stays"), [("evener.strategies.one", True), ("mine", False)])
def test_hooks_of_a_strategy_are_its_own(home: str, stays: bool) -> None:
    """It may exchange them in the first pass. Those of the user's code are as before."""

    def before(module: nn.Module, inputs: Any) -> None:
        first.remove()
        model.register_forward_hook(after, with_kwargs=True)

    def after(module: nn.Module, inputs: Any, named: Any, outputs: Tensor) -> None:
        pass

    before.__module__ = after.__module__ = home
    model = nn.Linear(2, 2)
    first = model.register_forward_pre_hook(before)
    with state_kept(model):
        model(torch.randn(1, 2))
    found = len(model._forward_pre_hooks), len(model._forward_hooks), len(model._forward_hooks_with_kwargs)
    assert found == ((0, 1, 1) if stays else (1, 0, 0))


class Converting(nn.Module):
    """Converts its layer in each forward pass, as routers of ``transformers`` do in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer.to(torch.float32)(x)
        return found


def test_a_type_that_a_pass_changes_is_as_before() -> None:
    model = Converting()
    before = model.layer.weight.detach().clone()
    with state_kept(model):
        model(torch.randn(3, 2))
    assert model.layer.weight.dtype == torch.bfloat16
    assert torch.equal(model.layer.weight, before)


@pytest.mark.parametrize("kept", [state_kept, nullcontext])
def test_weights_that_contexts_keep_are_not_those_of_a_trial(kept: Any) -> None:
    first: Any = weight_norm(nn.Linear(3, 4))
    last = nn.Linear(4, 2)
    nn.init.zeros_(last.weight)  # which a trial disturbs
    model = nn.Sequential(first, last)
    with parametrize.cached(), torch.autocast("cpu", torch.bfloat16):
        with undisturbed(model), kept(model):
            model(torch.ones(1, 3))
        found = model(torch.ones(1, 3))
        assert torch.is_autocast_cache_enabled()
    assert torch.equal(found[0], last.bias.bfloat16())
    found.sum().backward()
    assert first.parametrizations.weight.original0.grad is not None
