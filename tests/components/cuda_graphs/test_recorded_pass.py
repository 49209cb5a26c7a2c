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
from tests.components.cuda_graphs.tape import TapeRecorder

T = TypeVar("T")
WEIGHT = torch.arange(1.0, 4.0)
CPU = torch.device("cpu")


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


def test_the_norms_of_a_pass_are_those_of_its_gradients_until_something_writes_to_them() -> None:
    model, micro = (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)),
        MicroBatch(inputs=torch.randn(2, 3), targets=torch.zeros(2), samples=torch.arange(2)),
    )

    def run(given: MicroBatch) -> Tensor:
        total: Tensor = model(given.inputs).square().sum()
        return total

    parameters = list(model.parameters())
    made = RecordedPass(micro, run, parameters, parameters, TapeRecorder(CPU), norms=True)
    assert made.norms_of([torch.zeros_like(p) for p in parameters]) is None
    made.forward(micro)
    found = [each.detach() for each in made.backward(torch.tensor(0.5))]
    norms = made.norms_of(found)
    assert norms is not None
    assert norms.tolist() == [float(each.abs().max()) for each in found]
    assert made.norms_of([each.clone() for each in found]) is None
    assert made.norms_of(found[1:]) is None
    found[2].mul_(2)  # as a hook does
    assert made.norms_of(found) is None
    made.backward(torch.tensor(0.5))
    assert made.norms_of(found) is not None
    without = RecordedPass(micro, run, parameters, parameters, TapeRecorder(CPU))
    assert without.norms_of(without.backward(torch.tensor(0.5))) is None


def test_the_gradient_of_the_loss_is_copied_only_if_it_has_changed() -> None:
    weight = nn.Parameter(torch.ones(3))
    micro = MicroBatch(inputs=torch.ones(2, 3), targets=torch.zeros(2), samples=torch.arange(2))
    made = RecordedPass(
        micro, lambda given: (given.inputs * weight).sum(), [weight], [weight], TapeRecorder(CPU)
    )
    start, seen = torch.tensor(0.5), list[tuple[float, int]]()
    for written in (False, False, True):
        if written:
            start.mul_(4)
        made.forward(micro)
        with Operators() as operators:
            gradient = float(made.backward(start)[0][0])
        seen.append((gradient, operators.copies))
    least = seen[1][1]
    assert seen == [(1.0, least + 1), (1.0, least), (4.0, least + 1)]
