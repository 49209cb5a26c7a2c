from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from evener.components.build import (
    build_optimizer,
    build_scheduler,
    check_trainable,
    explaining_model_errors,
)
from evener.errors import TaskError
from tests import tasks
from tests.ids import placeless


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    model.add_module("module", nn.Linear(3, 3, bias=False))
    return model


NAMES = [name for name, _ in net().named_parameters()]


def built(factory: Callable[..., Any], model: nn.Module | None = None) -> torch.optim.Optimizer:
    return build_optimizer(tasks._task(optimizer=factory), net() if model is None else model)


def sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def test_two_groups_of_two_comprehensions_hold_all_parameters() -> None:
    """A generator would be empty for the second, and all biases stay untrained."""
    optimizer = built(
        lambda parameters: AdamW(
            [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
            ]
        )
    )
    assert sizes(optimizer) == [3, 4]


def decay(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    assert [name for name, _ in named_parameters] == NAMES
    return SGD([p for _, p in named_parameters], lr=0.1)


def of_model(model: nn.Sequential, lr: float = 0.1) -> torch.optim.Optimizer:
    assert isinstance(model, nn.Sequential)
    return SGD(model.parameters(), lr=lr)


def annotated(network: nn.Module) -> torch.optim.Optimizer:
    return of_model(network)  # type: ignore[arg-type]


def listed(anything: list[nn.Parameter]) -> torch.optim.Optimizer:
    assert isinstance(anything, list)
    assert all(isinstance(p, nn.Parameter) for p in anything)
    return SGD(anything, lr=0.1)


class Factory:
    def __call__(self, named_parameters: Any) -> torch.optim.Optimizer:
        return decay(named_parameters)


FACTORIES = [decay, of_model, annotated, listed, Factory(), functools.partial(SGD, lr=0.1), SGD]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("factory", FACTORIES, ids=placeless)
def test_a_factory_gets_what_its_parameter_is_called(factory: Any, compiled: bool) -> None:
    model = torch.compile(net(), backend="eager") if compiled else net()
    assert sizes(built(factory, model)) == [7]


def test_names_of_inner_wrappers_are_clean() -> None:
    model = net()
    model[0] = torch.compile(model[0], backend="eager")  # type: ignore[index,operator]
    assert "0._orig_mod.weight" in dict(model.named_parameters())
    built(decay, model)


@pytest.mark.parametrize(
    "factory", [lambda: SGD([torch.ones(1)]), lambda model, parameters: None], ids=["none", "two"]
)
def test_a_factory_takes_one_argument(factory: Any) -> None:
    with pytest.raises(TaskError, match=r"Task\.optimizer is called with one argument, and takes \("):
        built(factory)


def test_tied_parameters_are_one() -> None:
    assert sizes(built(SGD, tasks.Tokens())) == [3]


def test_an_exhausted_iterator_is_refused_with_the_names_left_out() -> None:
    def factory(model: nn.Module) -> torch.optim.Optimizer:
        parameters = model.named_parameters()
        weights = [p for name, p in parameters if "bias" not in name]
        return AdamW([{"params": weights}, {"params": [p for name, p in parameters if "bias" in name]}])

    with pytest.raises(
        TaskError, match=r"group 1 of the optimizer is empty, and 3 of .*0\.bias, 1\.bias, 2\.bias"
    ):
        built(factory)


def test_an_empty_group_that_leaves_nothing_out_is_fine() -> None:
    assert sizes(built(lambda parameters: AdamW([{"params": parameters}, {"params": []}]))) == [7, 0]


def test_parameters_left_out_are_named_once_and_frozen_ones_are_not() -> None:
    model = net()
    with pytest.warns(
        UserWarning, match=r"2 of .* never be trained.*: 2\.bias, module\.weight\. If"
    ) as caught:
        built(lambda parameters: SGD(parameters[:5], lr=0.1), model)
    assert len(caught) == 1
    for parameter in list(model.parameters())[5:]:
        parameter.requires_grad_(False)
    with warnings.catch_warnings(action="error"):
        built(lambda parameters: SGD(parameters[:5], lr=0.1), model)


def test_strangers_are_refused() -> None:
    loose = nn.Parameter(torch.ones(2, 5))
    with pytest.raises(TaskError, match=r"holds 1 tensors that are no parameters .* \(2, 5\)"):
        built(lambda parameters: SGD([*parameters, loose], lr=0.1))


class Sam(SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, functools.partial(Sam, lr=0.1)])
def test_optimizers_that_need_a_closure_are_refused(kind: Any) -> None:
    with pytest.raises(TaskError, match=r"(LBFGS|Sam), whose step\(\) evaluates the loss several times"):
        built(kind)


@pytest.mark.parametrize(
    "name", ["Adadelta", "Adagrad", "Adam", "AdamW", "ASGD", "NAdam", "RMSprop", "Rprop"]
)
def test_optimizers_of_torch_pass(name: str) -> None:
    built(getattr(torch.optim, name))


@pytest.mark.parametrize("value", [None, 3, SGD])
def test_what_is_no_optimizer_is_refused(value: Any) -> None:
    with pytest.raises(TaskError, match=r"it must return a torch\.optim\.Optimizer"):
        built(lambda parameters: value)


def test_schedulers() -> None:
    optimizer = built(SGD)
    assert build_scheduler(tasks._task(), optimizer) is None
    step = tasks._task(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1))
    assert isinstance(build_scheduler(step, optimizer), torch.optim.lr_scheduler.StepLR)
    for wrong, words in (
        (torch.optim.lr_scheduler.ReduceLROnPlateau, "loop of your own"),
        (lambda o: 0.1, "Task.scheduler returned float"),
    ):
        with pytest.raises(TaskError, match=words):
            build_scheduler(tasks._task(scheduler=wrong), optimizer)


def test_something_must_be_trained() -> None:
    check_trainable(net())
    with pytest.raises(TaskError, match="Sequential has no parameter that requires a gradient"):
        check_trainable(net().requires_grad_(False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("ask", [lambda x: x.cuda(), lambda x: x.to("cuda:1")])
def test_a_model_that_asks_for_a_gpu_is_told_to_leave_it(ask: Callable[[Tensor], Tensor]) -> None:
    task = tasks._task(model=lambda: ask(torch.ones(1)), name="mine")
    with (
        pytest.raises(
            TaskError, match=r"Task\.model of 'mine' asks for a device.*remove \.cuda\(\)"
        ) as caught,
        explaining_model_errors(task),
    ):
        task.model()
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), AssertionError(), ValueError("cuda")])
def test_other_errors_of_a_model_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explaining_model_errors(tasks.plain()):
        raise error
    assert caught.value is error
