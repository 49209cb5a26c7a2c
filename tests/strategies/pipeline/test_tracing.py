"""What the reading of a model's outermost code must not miss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from evener.errors import TaskError
from evener.strategies.pipeline.stage_code import function_of
from evener.strategies.pipeline.stages import Stages
from evener.strategies.pipeline.tracing import opened_in, read_both


class Reversed(torch.autograd.Function):
    """As for training against an adversary: what goes back is turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None


reverse: Any = Reversed.apply


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def between(self, x: Tensor) -> Tensor:
        found: Tensor = Reversed.apply(x, 0.5)  # type: ignore[no-untyped-call]
        return found

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.blocks[0](x))
        found: Tensor = self.blocks[1](x)
        return found


class Bound(ByName):
    def between(self, x: Tensor) -> Tensor:
        found: Tensor = reverse(x, 0.5)
        return found


@pytest.mark.parametrize("kind", [ByName, Bound])
def test_a_function_with_a_backward_of_its_own_keeps_it(kind: type[ByName]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 3)
    graph = read_both(model, {"x": x}, ())[True]
    assert [node.name for node in graph.nodes if node.op == "call_function"] == ["reversed_1"]
    gradients = []
    for run in (model, fx.GraphModule(model, graph), partial(one_stage(model, x), model)):
        model.zero_grad()
        run(x).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, *others in zip(*gradients, strict=True):
        assert plain is not None
        for read in others:
            assert read is not None
            assert torch.equal(plain, read)


def one_stage(model: nn.Module, x: Tensor) -> Callable[..., Any]:
    """All of the model as a stage runs it."""
    stages = Stages(model, "", 1, {"x": x})
    return function_of(
        stages.stage(0, True), [node for node in stages.graph(True).nodes if node.op == "placeholder"]
    )


class Without(ByName):
    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = reverse(x, 0.5)
        return found


def test_a_function_without_gradients_stays_so() -> None:
    model, x = Without(), torch.randn(4, 3)
    one_stage(model, x)(model, x).sum().backward()
    assert [parameter.grad is None for parameter in model.parameters()] == [True, True, False, False]


def test_a_module_whose_gradients_have_hooks_is_one_call() -> None:
    model = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))
    model[1].register_full_backward_hook(lambda module, to, came: None)
    assert opened_in(model, ()) == {"", "0"}


class Again(ByName):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_code_whose_activations_are_computed_again_is_not_read() -> None:
    """The calls alone would keep them."""
    with pytest.raises(TaskError, match="saves tensors for backward in a way of its own"):
        read_both(Again(), {"x": torch.randn(4, 3)}, ())
