"""Builds a task's optimizer and scheduler, and checks that the optimizer trains the whole model and nothing else.

An optimizer that misses parameters raises no error. The parameters keep their initial values, and only the result is
worse. So the optimizer's parameters are compared with the model's.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.core.task.device_errors import explaining_placement
from evener.core.task.task import Task
from evener.errors import TaskError
from evener.nn.fqn import clean_names, unwrapped


def build_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """Builds the optimizer of the model's parameters, which are on their final device.

    ``Task.optimizer`` is called with a list of the parameters, each once, in the order of ``model.named_parameters()``.
    The name of its first parameter can request something else: ``named_parameters`` gets a list of pairs ``(name,
    parameter)``; ``model``, or an annotation ``nn.Module``, gets the model itself.

    Warns:
        UserWarning: If parameters that require a gradient are in no group. Lists their names.

    Raises:
        TaskError: If the task returns something else; if the optimizer needs a closure, holds tensors that are no
            parameters of the model, or has an empty group while some parameters are in none.
    """
    optimizer = task.optimizer(what_is_asked_for(task.optimizer, model))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(
            f"Task.optimizer returned {type(optimizer).__name__}; it must return a torch.optim.Optimizer"
        )
    _refuse_closures(optimizer)
    _refuse_strangers(optimizer, model)
    _check_coverage(optimizer, model)
    return optimizer


def build_scheduler(
    task: Task, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Builds the task's learning rate scheduler. Returns None if the task has none.

    Raises:
        TaskError: If it is a ReduceLROnPlateau, which needs a metric, or no scheduler at all.
    """
    scheduler = task.scheduler(optimizer) if task.scheduler else None
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TaskError(
            "Task.scheduler is a ReduceLROnPlateau, which has to be told a metric: leave it out of the task, and call "
            "it in a loop of your own with what engine.evaluate() returns"
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise TaskError(
            f"Task.scheduler returned {type(scheduler).__name__}; it must return a learning rate scheduler, as in "
            "`scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)`"
        )
    return scheduler


def check_trainable(model: nn.Module) -> None:
    """Raises TaskError if the model has no trainable parameter."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TaskError(f"the model {type(model).__name__} has no parameter that requires a gradient")


def explaining_model_errors(task: Task) -> AbstractContextManager[None]:
    """Context for the call of ``Task.model``: replaces an error about a missing GPU by one that says what to do.

    Raises:
        TaskError: In place of PyTorch's error, and chained to it.
    """
    return explaining_placement(f"Task.model of {task.name!r}")


def what_is_asked_for(factory: Any, model: nn.Module) -> Any:
    """Returns what ``Task.optimizer`` is called with, as :func:`build_optimizer` tells."""
    asked = _first_parameter(factory)
    if asked is not None and asked.name == "named_parameters":
        return clean_names(model)
    if asked is not None and (asked.name == "model" or _is_module(asked.annotation)):
        return unwrapped(model)
    return [parameter for _, parameter in clean_names(model)]


def _first_parameter(factory: Any) -> inspect.Parameter | None:
    """Returns the factory's parameter that takes the one argument. Returns None if its signature is unknown.

    Raises:
        TaskError: If the factory cannot be called with one argument.
    """
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(None)
    except TypeError as error:
        raise TaskError(
            f"Task.optimizer is called with one argument, and takes {signature}: {error}; write it as in "
            "`optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)`"
        ) from error
    return next(iter(signature.parameters.values()))


def _is_module(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.rpartition(".")[2] == "Module"
    return isinstance(annotation, type) and issubclass(annotation, nn.Module)


def _refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TaskError(
            f"Task.optimizer returned {type(optimizer).__name__}, whose step() evaluates the loss several times "
            "through a closure; a step here evaluates it once. Use an optimizer that steps from gradients, such as "
            "torch.optim.AdamW or SGD"
        )


def held_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _refuse_strangers(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    strangers = [tensor for tensor in held_by(optimizer) if id(tensor) not in own]
    if strangers:
        shapes = _shown([str(tuple(tensor.shape)) for tensor in strangers])
        raise TaskError(
            f"the optimizer holds {len(strangers)} tensors that are no parameters of the model, of shapes {shapes}: "
            "their gradients would not be summed over the ranks. Build the optimizer from the parameters that "
            "Task.optimizer is given, and make what is trained besides (weights of a loss, say) parameters of the model"
        )


def _check_coverage(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    held = {id(tensor) for tensor in held_by(optimizer)}
    missed = [name for name, p in clean_names(model) if p.requires_grad and id(p) not in held]
    if not missed:
        return
    empty = [number for number, group in enumerate(optimizer.param_groups) if not group["params"]]
    what = (
        f"{len(missed)} of the model's parameters would never be trained, being in no group of the optimizer"
    )
    if empty:
        raise TaskError(
            f"group {_shown([str(number) for number in empty])} of the optimizer is empty, and {what}: "
            f"{_shown(missed)}. An iterator that was read once is empty the second time: make the groups from lists"
        )
    if not (dist.is_initialized() and dist.get_rank()):
        warnings.warn(
            f"{what}: {_shown(missed)}. If that is meant, set requires_grad=False for them, which also saves "
            "their gradients; else give the optimizer all parameters",
            stacklevel=2,
        )


def _shown(names: Sequence[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f", ... ({len(names)} in all)" if len(names) > limit else "")
