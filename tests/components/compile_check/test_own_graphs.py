"""What a task or a loop compiles by itself is compared, too."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import evener
from evener.errors import DivergenceError
from evener.nn.fqn import clean_name
from evener.training.engine import Engine
from tests import tasks
from tests.comparing import worst
from tests.components.compile_check import wrong_code
from tests.components.compile_check.test_graph_on_ranks import trained
from tests.components.test_compile import Tower
from tests.tiers import ALWAYS, NIGHTLY, spread
from tests.training.prepare.running import with_settings

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")
"""At which the compiler looks."""


class Doubling(nn.Module):
    """A function in its forward pass is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.twice = torch.compile(lambda x: 2 * x, backend="scaled")

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(self.twice(x))
        return outputs


def compiled_by_itself() -> Any:
    return torch.compile(Tower(), backend="without_weights")


def compiled_in_place() -> nn.Module:
    model = Tower()
    model.compile(backend="scaled")
    return model


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (compiled_by_itself, "the gradient of heads.one.weight is 100 % off"),
        (compiled_in_place, "is 1 % off"),
        (Doubling, "output 0 is 1 % off"),
    ],
)
def test_what_the_task_itself_compiles_is_compared(model: Any, named: str) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with Engine(tasks._task(model=model), device="cpu", dtype="float64", steps=3) as engine:
            list(map(engine.step, engine.batches()))
            found = {clean_name(name): value.clone() for name, value in engine.learner.tensors().items()}
    (words,) = [str(each.message) for each in seen if "compile:" in str(each.message)]
    assert "In what the task itself compiles (rank 0): " in words
    assert named in words
    if model is not Doubling:
        assert worst(trained("tower")[0], found) <= 1e-12


def test_a_run_may_be_ended_by_what_the_task_itself_compiles() -> None:
    task = tasks._task(model=compiled_in_place)
    with (
        Engine(task, device="cpu", compile_check="stop") as engine,
        pytest.raises(DivergenceError, match="In what the task itself compiles"),
    ):
        list(map(engine.step, engine.batches()))


def test_what_others_compile_after_a_run_is_left_alone() -> None:
    with Engine(tasks.plain(), device="cpu", steps=1) as engine:
        list(map(engine.step, engine.batches()))
    outputs = torch.compile(lambda x: x + 1, backend="scaled")(torch.ones(3))
    assert torch.equal(outputs, torch.full((3,), 2.0) * 1.01)


def prepared(compile_first: bool) -> list[str]:
    """A loop of the user's own, which compiles its model before or after it is prepared."""
    wrong_code.register()
    torch.compiler.reset()
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(tasks.draws(20, 6), tasks.classes(20, 3)), batch_size=5)
    model: Any = Tower()
    with with_settings(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = torch.compile(model, backend="scaled") if compile_first else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, data, loss = evener.prepare(model, optimizer, data, nn.CrossEntropyLoss())
        model = model if compile_first else torch.compile(model, backend="scaled")
        for x, y in data:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    return [str(each.message) for each in seen if "compile:" in str(each.message)]


@pytest.mark.parametrize("compile_first", spread([True, False], NIGHTLY, ALWAYS))
def test_what_a_loop_of_ones_own_compiles_is_compared(ranks: Any, compile_first: bool) -> None:
    first, second = ranks(2).run(prepared, compile_first)
    assert not second
    assert "In what the task itself compiles (rank 0, 1): " in first[0]
