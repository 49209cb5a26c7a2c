"""The gradients of a recorded pass lie where nothing else writes, and most where autograd has made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from evener.components.cuda_graphs.recorded_pass import RecordedPass
from evener.data.batch import MicroBatch
from evener.torch_internals.dispatch import DispatchMode

T = TypeVar("T")
WEIGHT = torch.arange(1.0, 4.0)


class Constant(torch.autograd.Function):
    """Its gradient is a tensor that others hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * WEIGHT).sum()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Tensor:
        return WEIGHT


class Operators(DispatchMode):
    """Sees which operators run, and keeps no tensor, as a CUDA graph keeps none."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.copies += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))

    def replay(self) -> None:
        raise AssertionError("nothing is kept")


class Runs:
    """A recorder that only runs what it is given."""

    def __init__(self) -> None:
        self.seen: list[Operators] = []

    def warming_up(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, function: Callable[[], T]) -> tuple[T, Operators]:
        with Operators() as operators:
            found = function()
        self.seen.append(operators)
        return found, operators


def recorded(parameters: list[nn.Parameter], run: Callable[[Tensor], Tensor]) -> tuple[RecordedPass, int]:
    """A pass, and how many tensors its backward has copied."""
    micro, recorder = (
        MicroBatch(inputs=torch.ones(2, 3), targets=torch.zeros(2), samples=torch.arange(2)),
        Runs(),
    )
    made = RecordedPass(micro, lambda given: run(given.inputs), parameters, parameters, recorder)
    return made, recorder.seen[1].copies


def test_gradients_stay_where_autograd_has_made_them() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1))
    made, copies = recorded(list(model.parameters()), lambda x: model(x).square().sum())
    assert len(made.gradients) == 6
    assert copies == 0


@pytest.mark.parametrize(
    "run",
    [
        lambda one, other, x: (one + other + x).square().sum(),
        lambda one, other, x: one.sum() + other.sum(),
        lambda one, other, x: Constant.apply(one) + other.sum(),
    ],
    ids=["one gradient for both", "no memory of its own", "a tensor of the model"],
)
def test_gradients_that_others_use_are_copied(run: Callable[..., Tensor]) -> None:
    one, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    made, copies = recorded([one, other], lambda x: run(one, other, x))
    assert copies == 2
    kept = {each.data_ptr() for each in (*made.gradients, WEIGHT)}
    assert len(kept) == 3
    assert all(each.is_contiguous() for each in made.gradients)
