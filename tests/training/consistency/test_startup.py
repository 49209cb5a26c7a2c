"""Ranks that are about to train different things find out before anything travels."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import evener
from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError
from evener.training.consistency.startup import check_equal, warn_of_builds
from evener.training.consistency.task_description import Constants
from evener.training.engine import Engine
from evener.training.prepare import prepare as preparing
from tests import tasks


def rank() -> int:
    return torch.distributed.get_rank()


def data(size: int) -> TensorDataset:
    return TensorDataset(torch.zeros(size, 6), torch.zeros(size).long())


def train_rows() -> Any:
    return tasks._task(train=data(158 + 2 * rank()))


def evaluation_rows() -> Any:
    return tasks._task(evaluate=data(10 + rank()))


def widths() -> Any:
    return tasks._task(model=lambda: nn.Sequential(nn.Linear(6, 8 + rank()), nn.Linear(8 + rank(), 3)))


def frozen() -> Any:
    def model() -> nn.Module:
        built = tasks.plain().model()
        next(built.parameters()).requires_grad_(rank() == 0)
        return built

    return tasks._task(model=model)


def other(**parts: Any) -> Any:
    """A task that differs on rank 1 alone."""
    return tasks._task(**parts) if rank() == 1 else tasks.plain()


def modelled(usual: Any, differs: Any) -> Any:
    return tasks._task(model=lambda: differs() if rank() == 1 else usual())


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Linear(8, 3))


class Two(nn.Module):
    def __init__(self, *names: str, tied: bool = False) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(6, 4))
        if tied:
            self.second.weight = self.first.weight
        self.last = nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x) + self.second(x))


def types() -> Any:
    return modelled(lambda: mlp(), lambda: mlp().double())


def one_more() -> Any:
    def more() -> nn.Module:
        model = mlp()
        model.register_parameter("unused", nn.Parameter(torch.zeros(1)))
        return model

    return modelled(mlp, more)


def orders() -> Any:
    return modelled(lambda: Two("first", "second"), lambda: Two("second", "first"))


def ties() -> Any:
    return modelled(lambda: Two("first", "second", tied=True), lambda: Two("first", "second"))


def functions() -> Any:
    return modelled(lambda: mlp(nn.Tanh()), lambda: mlp(nn.ReLU()))


def dropped() -> Any:
    return modelled(lambda: mlp(nn.Dropout(0.5)), lambda: mlp(nn.Dropout(0.25)))


def sgd(lr: float = 0.1, **options: Any) -> Any:
    return tasks._task(optimizer=lambda p: torch.optim.SGD(p, lr=lr, **options))


def lr() -> Any:
    return sgd(0.1 + 0.1 * (rank() == 1))


def decays() -> Any:
    return sgd(weight_decay=0.5) if rank() == 1 else sgd()


def groups() -> Any:
    def two(parameters: Any) -> Any:
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)

    return tasks._task(optimizer=two) if rank() == 1 else sgd()


def optimizers() -> Any:
    return tasks._task(optimizer=lambda p: torch.optim.Adam(p, lr=0.1)) if rank() == 1 else sgd()


def arranged() -> Any:
    def backwards(parameters: Any) -> Any:
        return torch.optim.SGD(list(parameters)[::-1], lr=0.1)

    return tasks._task(optimizer=backwards) if rank() == 1 else sgd()


def losses() -> Any:
    return other(loss=nn.MultiMarginLoss())


def weighted() -> Any:
    return other(loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 2.0])))


def smoothed() -> Any:
    return other(loss=nn.CrossEntropyLoss(label_smoothing=0.1))


def applied() -> Any:
    smoothing = 0.25 * rank()
    return tasks._task(
        loss=evener_loss(functools.partial(functional.cross_entropy, label_smoothing=smoothing))
    )


def evener_loss(function: Any) -> Any:
    return lambda outputs, targets: function(outputs, targets)


def enclosed() -> Any:
    scale = 1.0 + rank()
    return tasks._task(loss=lambda outputs, targets: scale * functional.cross_entropy(outputs, targets))


def defaulted() -> Any:
    def loss(outputs: Any, targets: Any, *, smoothing: float = 0.1 * rank()) -> Any:
        return functional.cross_entropy(outputs, targets, label_smoothing=smoothing)

    return tasks._task(loss=loss)


def written() -> Any:
    first = lambda outputs, targets: functional.cross_entropy(outputs, targets, label_smoothing=0.1)  # noqa: E731
    second = lambda outputs, targets: functional.cross_entropy(outputs, targets, label_smoothing=0.2)  # noqa: E731
    return tasks._task(loss=second if rank() == 1 else first)


class Focal:
    """A loss that is no module."""

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma

    def __call__(self, outputs: Any, targets: Any) -> Any:
        return functional.cross_entropy(outputs, targets) * self.gamma


def focal() -> Any:
    return tasks._task(loss=Focal(2.0 + rank()))


def betas() -> Any:
    second = 0.9 if rank() == 1 else 0.99
    return tasks._task(optimizer=lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, second)))


class Sharpness(torch.optim.SGD):
    def __init__(self, parameters: Any, rho: float) -> None:
        super().__init__(parameters, lr=0.1)
        self.rho = rho


def beside() -> Any:
    return tasks._task(optimizer=lambda p: Sharpness(p, 0.05 + rank()))


def decaying() -> Any:
    gamma = 0.5 if rank() == 1 else 0.9
    return tasks._task(scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, gamma))


def warming() -> Any:
    steps = 10.0 + rank()
    return tasks._task(
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: min(1.0, n / steps))
    )


def by_rounding() -> Any:
    """Class weights that two kinds of processors have computed."""
    weights = torch.tensor([1.0, 1.0, 2.0]) * (1.0 + 1e-7 * rank())
    return tasks._task(loss=nn.CrossEntropyLoss(weight=weights))


def penalties() -> Any:
    return other(penalty=lambda model: sum(p.sum() for p in model.parameters()))


def unseeded() -> Any:
    """As ``torch.randn`` without a generator would give on each rank."""
    return other(
        train=TensorDataset(tasks.draws(tasks.SAMPLES, 6, seed=7), torch.zeros(tasks.SAMPLES).long())
    )


class Augmented(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.rand(()) * 0.1, y


def augmented() -> Any:
    return tasks._task(train=Augmented(*data(20).tensors), evaluate=[(torch.zeros(6), 0)])


def same() -> Any:
    return tasks.plain()


def refused(name: str, config: dict[str, list[Any]]) -> str:
    own = {key: values[rank()] for key, values in config.items()}
    try:
        with Engine(globals()[name](), RunConfig(device="cpu", steps=1, **own)):
            return "nothing was said"
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("train_rows", {}, "length of the training set is 158 on ranks 0, 1, 160 on rank 2"),
        ("evaluation_rows", {}, "length of the evaluation set is 10 on rank 0, 11 on rank 1, 12 on rank 2"),
        ("widths", {}, "0.weight: float32 of (8, 6) on rank 0, 0.weight: float32 of (9, 6) on rank 1"),
        ("frozen", {}, "0.weight: float32 of (8, 6) on rank 0, 0.weight: float32 of (8, 6), not trained on"),
        ("types", {}, "0.weight: float64 of (8, 6) on rank 1"),
        ("one_more", {}, "unused: float32 of (1,) on rank 1"),
        (
            "orders",
            {},
            "first.weight: float32 of (4, 6) on ranks 0, 2, second.weight: float32 of (4, 6) on rank 1",
        ),
        ("ties", {}, "the same as first.weight on ranks 0, 2"),
        ("functions", {}, "1: Tanh() on ranks 0, 2, 1: ReLU() on rank 1"),
        ("dropped", {}, "1: Dropout(p=0.25, inplace=False) on rank 1"),
        ("lr", {}, "lr in the optimizer's group 0 is 0.1 on ranks 0, 2, 0.2 on rank 1"),
        ("decays", {}, "weight_decay in the optimizer's group 0 is 0 on ranks 0, 2, 0.5 on rank 1"),
        ("groups", {}, "the number of the optimizer's groups is 1 on ranks 0, 2, 2 on rank 1"),
        ("optimizers", {}, "the optimizer is SGD on ranks 0, 2, Adam on rank 1"),
        (
            "arranged",
            {},
            "parameter 0 in the optimizer's group 0 is 0.weight on ranks 0, 2, 2.bias on rank 1",
        ),
        ("losses", {}, "Task.loss is CrossEntropyLoss on ranks 0, 2"),
        ("weighted", {}, "Task.loss.weight is None on ranks 0, 2, float32 of (3,): 1, 1, 2 on rank 1"),
        ("smoothed", {}, "Task.loss.label_smoothing is 0.0 on ranks 0, 2, 0.1 on rank 1"),
        (
            "applied",
            {},
            "label_smoothing of function in Task.loss is 0.0 on rank 0, 0.25 on rank 1, 0.5 on rank 2",
        ),
        ("enclosed", {}, "scale in Task.loss is 1.0 on rank 0, 2.0 on rank 1, 3.0 on rank 2"),
        ("defaulted", {}, "the default of smoothing in Task.loss is 0.0 on rank 0, 0.1 on rank 1"),
        ("written", {}, "constants in Task.loss is"),
        ("focal", {}, "Task.loss.gamma is 2.0 on rank 0, 3.0 on rank 1"),
        ("betas", {}, "betas in the optimizer's group 0 is (0.9, 0.99) on ranks 0, 2, (0.9, 0.9) on rank 1"),
        ("beside", {}, "rho of the optimizer is 0.05 on rank 0, 1.05 on rank 1"),
        ("decaying", {}, "the scheduler.gamma is 0.9 on ranks 0, 2, 0.5 on rank 1"),
        ("warming", {}, "steps in the scheduler.lr_lambdas[0] is 10.0 on rank 0, 11.0 on rank 1"),
        ("unseeded", {}, "sample 0 is not the same in the training set of rank 0 and rank 1"),
        ("penalties", {}, "a penalty of the task is False on ranks 0, 2, True on rank 1"),
        ("same", {"seed": [0, 0, 1]}, "setting seed is 0 on ranks 0, 1, 1 on rank 2"),
        ("same", {"batch_size": [8, 9, 8]}, "setting batch_size is 8 on ranks 0, 2, 9 on rank 1"),
    ],
    ids=str,
)
def test_ranks_that_differ_are_named_on_every_rank(
    ranks: Any, name: str, config: dict[str, list[Any]], words: str
) -> None:
    if name == "train_rows":
        config = config | {"seed": [0, 0, 0]}
    for message in ranks(3).run(refused_for_two if name == "train_rows" else refused, name, config):
        assert "the ranks do not train the same" in message
        assert words in message


def refused_for_two(name: str, config: dict[str, list[Any]]) -> str:
    """Rows of 158, 158 and 160."""
    try:
        rows = data(160 if rank() == 2 else 158)
        with Engine(tasks._task(train=rows), RunConfig(device="cpu", steps=1)):
            return "nothing was said"
    except ConfigurationError as error:
        return str(error)


def test_what_machines_may_have_of_their_own_is_not_compared(ranks: Any) -> None:
    config = {"workers": [0, 1], "run_dir": ["a", "b"]}
    assert ranks(2).run(refused, "same", config) == ["nothing was said"] * 2
    assert ranks(2).run(refused, "augmented", {}) == ["nothing was said"] * 2
    assert ranks(2).run(refused, "by_rounding", {}) == ["nothing was said"] * 2


def refused_in_a_loop(apart: bool) -> list[str]:
    """A criterion beside the model, one given later, and a scheduler."""
    found = []
    for later in (False, True):
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mine = rank() if apart else 0
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1 * mine)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3 + mine)
        try:
            evener.prepare(model, optimizer, *(() if later else (criterion,)), device="cpu")
            if later:
                evener.prepare(scheduler)
            found.append("nothing was said")
        except ConfigurationError as error:
            found.append(str(error))
        preparing.end()
    return found


def test_a_loop_of_ones_own_has_the_same_criterion_and_scheduler_on_all_ranks(ranks: Any) -> None:
    for first, second in ranks(2).run(refused_in_a_loop, True):
        assert "loss or scheduler 0.label_smoothing is 0.0 on rank 0, 0.1 on rank 1" in first
        assert "loss or scheduler 0.step_size is 3 on rank 0, 4 on rank 1" in second
    assert ranks(2).run(refused_in_a_loop, False) == [["nothing was said"] * 2] * 2


def test_other_versions_of_python_compile_to_other_constants() -> None:
    assert Constants(("1",)) != Constants(("2",))
    assert Constants(("1",), (3, 11)) == Constants(("2",), (3, 14))


def test_many_ranks_are_told_in_short() -> None:
    facts = [{"x": 1}] * 50 + [{"x": 2}]
    with pytest.raises(ConfigurationError, match=r"x is 1 on ranks 0, 1, 2, 3, \.\.\., 2 on rank 50"):
        check_equal(facts)
    check_equal(facts[:50])


def test_builds_of_torch_may_differ_and_versions_may_not() -> None:
    """Hosts of different kinds have each their own build."""
    with pytest.warns(
        UserWarning, match=r"builds of torch: 2\.13\.0\+cpu on rank 0, 2\.13\.0\+cu130 on rank 1"
    ):
        warn_of_builds([("3.11.7", "2.13.0+cpu"), ("3.11.7", "2.13.0+cu130")])
    with pytest.warns(UserWarning, match=r"versions of Python: 3\.11\.7 on rank 0, 3\.12\.1 on rank 1"):
        warn_of_builds([("3.11.7", "2.13.0+cpu"), ("3.12.1", "2.13.0+cpu")])
    warn_of_builds([("3.11.7", "2.13.0+cpu")] * 2)
