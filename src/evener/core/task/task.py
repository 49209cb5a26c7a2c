"""What to train, independent of where and how.

A task is built afresh on every rank by a function, so that nothing that lives on one device or in one process has to
be sent to another. The function is named ``package.module:function`` or given as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import Dataset

from evener.core.losses import Loss, exact
from evener.core.plugins import find, kind_of
from evener.core.task.device_errors import explaining_placement
from evener.core.task.validation import (
    check_dataset,
    check_function,
    check_metrics,
    explaining_fields,
    positive,
)
from evener.core.types import Forward, MakeModel, MakeOptimizer, MakeScheduler, Tree
from evener.errors import TaskError


def call_model(model: nn.Module, inputs: Tree) -> Tree:
    """Calls the model with one argument, positional arguments (a tuple) or keyword arguments (a dict)."""
    if isinstance(inputs, torch.Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


@explaining_fields
@dataclass(frozen=True)
class Task:
    """What to train.

    An item of ``train`` and ``evaluate`` is a pair ``(inputs, targets)``, or a dict with ``labels``, which are the
    targets. Inputs that are a tensor become the one argument of the model, a tuple its positional and a dict its
    keyword arguments.

    Raises:
        TaskError: For a field that there is not, and for values of a wrong kind.
    """

    model: MakeModel
    """Builds the model, on every rank alike."""
    loss: Any
    """A :class:`~evener.core.losses.Loss`, or a loss of ``torch.nn`` as it is."""
    optimizer: MakeOptimizer
    """From a list of the model's parameters to their optimizer. A function whose first parameter is called
    ``named_parameters`` gets pairs ``(name, parameter)`` instead, and one whose first is called ``model`` the model."""
    train: Dataset[Any]
    """The training set: map-style, or iterable."""
    evaluate: Dataset[Any] | None = None
    """What metrics and the evaluation loss are computed on, each sample once; nothing where it is None."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Each a function ``(outputs, targets) -> Sum``, or a torchmetrics object."""
    scheduler: MakeScheduler | None = None
    """From the optimizer to a learning rate scheduler of torch."""
    scheduler_interval: Literal["epoch", "step"] = "epoch"
    """When the scheduler steps: after each epoch, or after each step."""
    order: Callable[[int], Any] | None = None
    """From the number of an epoch, from 0, to the numbers of its samples in their order, as many in each epoch: by
    length, with weights, or a part of ``train``. It depends on the epoch alone, and is the same on all ranks. None
    shuffles all samples by the run's seed."""
    partition: Literal["batch", "sample"] = "batch"
    """``batch``: all ranks can read all of ``train`` and ``evaluate``. ``sample``: what these hold on a rank is the
    part that it owns, as when hosts hold different files; the parts, of any size, are disjoint."""
    collate: Callable[[list[Any]], tuple[Tree, Tree]] | None = None
    """From a list of items to one pair ``(inputs, targets)``, as a DataLoader's ``collate_fn``; None stacks them."""
    penalty: Callable[[nn.Module], torch.Tensor] | None = None
    """A term of no sample, such as an L2 norm of weights: counted once a step, not once a rank."""
    forward: Forward = call_model
    """From the model and inputs to the outputs that the loss gets; here a model that returns several things is told
    which of them, as in ``lambda model, inputs: evener.call_model(model, inputs).logits``."""
    batch_size: int = 64
    """The global batch size where a run names none."""
    epochs: int = 1
    """The number of epochs where a run names none."""
    name: str = "task"
    """For messages and the names of directories."""

    def __post_init__(self) -> None:
        for name in ("model", "optimizer"):
            if not callable(getattr(self, name)):
                raise TaskError(
                    f"Task.{name} is {kind_of(getattr(self, name))}, not a function; {_CURES[name]}"
                )
        if isinstance(self.model, nn.Module):
            raise TaskError(
                f"Task.model is a built {type(self.model).__name__}, not a function; {_CURES['model']}"
            )
        if self.scheduler_interval not in ("epoch", "step"):
            raise TaskError(f"Task.scheduler_interval is {self.scheduler_interval!r}, not 'epoch' or 'step'")
        if self.partition not in ("batch", "sample"):
            raise TaskError(
                f"Task.partition is {self.partition!r}, not 'batch' or 'sample'; a partition by the features is "
                "strategy='dimension'"
            )
        self._check_kinds()

    def _check_kinds(self) -> None:
        if isinstance(self.loss, type):
            raise TaskError(
                f"Task.loss is {kind_of(self.loss)}; give an object of it: {self.loss.__name__}()"
            )
        check_dataset(self.train, "Task.train")
        if self.evaluate is not None:
            check_dataset(self.evaluate, "Task.evaluate")
        check_metrics(self.metrics)
        for name, (signature, optional) in _FUNCTIONS.items():
            check_function(name, getattr(self, name), signature, optional)
        for name in ("batch_size", "epochs"):
            object.__setattr__(self, name, positive(name, getattr(self, name)))

    def exact_loss(self) -> Loss:
        """The loss as a sum over terms.

        Raises:
            LossError: If the number of its terms cannot be known from the targets.
        """
        return exact(self.loss)


_CURES = {
    "model": "give the function that builds it, as in `model=lambda: Net()`, so that every rank builds its own",
    "optimizer": "give the function that builds it from parameters, as in "
    "`optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)`",
}


_FUNCTIONS = {
    "scheduler": ("from an optimizer to its scheduler", True),
    "order": ("from an epoch to the numbers of its samples", True),
    "collate": ("from a list of items to (inputs, targets)", True),
    "penalty": ("from the model to one number", True),
    "forward": ("from the model and inputs to outputs", False),
}
"""What these fields are, and whether they may be None."""


TaskLike = Task | Callable[..., Task] | str
"""A task, a function that builds one, or the name ``package.module:function`` of such a function."""


def resolve(
    task: TaskLike, known: Mapping[str, str] | None = None, options: Mapping[str, Any] | None = None
) -> Callable[[], Task]:
    """Finds what builds a task, without building it.

    Args:
        task: The task, its function, or its name.
        known: Short names and the ``package.module:function`` that each stands for.
        options: Keyword arguments for the function.

    Raises:
        TaskError: If there is no such task, or its function does not take these options. The returned function raises
            it if what it builds is no task.
    """
    options = options or {}
    if isinstance(task, Task):
        if options:
            raise TaskError(f"a Task that is built already takes no options, but got {_names(options)}")
        return lambda: task
    label = task if isinstance(task, str) else getattr(task, "__name__", "task")
    function = _find(task, known or {}) if isinstance(task, str) else task
    _check_options(label, function, options)
    return lambda: _built(label, function, options)


def _built(label: str, function: Callable[..., Task], options: Mapping[str, Any]) -> Task:
    with explaining_placement(f"the function of task {label!r}"):
        built: object = function(**options)
    if not isinstance(built, Task):
        raise TaskError(f"{label} returned {kind_of(built)}; it must return an evener.Task")
    return built


def _names(options: Iterable[str]) -> str:
    return ", ".join(sorted(options))


def _find(name: str, known: Mapping[str, str]) -> Callable[..., Task]:
    target = known.get(name, name)
    function: Callable[..., Task] = find(
        target, "task", "function", callable, known=sorted(known), error=TaskError
    )
    return function


def _check_options(label: str, function: Callable[..., Task], options: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        given = f" with the options {_names(options)}" if options else ""
        raise TaskError(f"task {label!r} cannot be built{given}: {error}") from error
