"""Tasks: a definition of what to train, independent of devices and strategies.

Every rank builds its own copy of the task by calling a function, so that no object that belongs to one device or
process has to be sent to another. The function is passed directly, or by the name ``package.module:function``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import Dataset

from evener.core.losses import Loss, exact
from evener.core.plugins import find, kind_of
from evener.core.task.average import Average, UpdateAverages, as_average
from evener.core.task.device_errors import explaining_placement
from evener.core.task.validation import (
    as_dataset,
    check_cost,
    check_dataset,
    check_function,
    check_metrics,
    explaining_fields,
    positive,
    with_own_place,
)
from evener.core.types import Forward, MakeModel, MakeOptimizer, MakeScheduler, Tree
from evener.errors import TaskError

Cost = Callable[[int], float] | Sequence[float] | str
"""``Task.cost``: a function from an index, one number for each sample, or the name of a column."""


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
    """Definition of a training task: model, loss, optimizer and data.

    An item of ``train`` and ``evaluate`` is a pair ``(inputs, targets)``, or a dict whose ``labels`` are the targets. A
    tensor as inputs is the only argument of the model; a tuple holds its positional, a dict its keyword arguments.

    Raises:
        TaskError: If a field is unknown or missing, or a value has the wrong type.
    """

    model: MakeModel
    """Function without arguments that builds the model. It must build the same model on every rank."""
    loss: Any
    """A :class:`~evener.core.losses.Loss`, or a loss of ``torch.nn``."""
    optimizer: MakeOptimizer
    """Function that maps a list of the model's parameters to their optimizer. If its first parameter is called
    ``named_parameters``, it gets pairs ``(name, parameter)`` instead; if it is called ``model``, it gets the model."""
    train: Dataset[Any]
    """The training set: map-style, or iterable."""
    evaluate: Dataset[Any] | None = None
    """The evaluation set, for the metrics and the evaluation loss; each sample counts once. None: no evaluation."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Metrics by name, each a function ``(outputs, targets) -> Sum``, a loss, or a torchmetrics object."""
    scheduler: MakeScheduler | None = None
    """Function that maps the optimizer to a learning rate scheduler of torch."""
    scheduler_interval: Literal["epoch", "step"] = "epoch"
    """When the scheduler steps: after each epoch, or after each step."""
    order: Callable[[int], Any] | None = None
    """Function that maps an epoch's number (from 0) to the indices of its samples, in order: by length, with weights,
    or a part of ``train``. Each epoch has the same number of indices. The result must depend on the epoch only, and be
    the same on all ranks. None: all samples, shuffled by the run's seed."""
    cost: Cost | None = None
    """The cost of each sample of ``train``, in any unit, such as its number of tokens: a function from its index, a
    sequence of one number for each sample, or the name of a column or attribute of ``train``. It must be positive, and
    the same on all ranks. Shares of a batch are then fractions of its cost instead of numbers of samples, so that no
    rank waits for one that happened to get long samples. The training stays the same. None: all samples cost the
    same."""
    partition: Literal["batch", "sample"] = "batch"
    """``batch``: all ranks can read all of ``train`` and ``evaluate``. ``sample``: on each rank these hold that rank's
    own samples only, for example if hosts store different files. The ranks' parts are disjoint and may differ in
    size."""
    collate: Callable[[list[Any]], tuple[Tree, Tree]] | None = None
    """Function that maps a list of items to one pair ``(inputs, targets)``, like a DataLoader's ``collate_fn``. None:
    the items are stacked."""
    penalty: Callable[[nn.Module], torch.Tensor] | None = None
    """Function that maps the model to a loss term that depends on no sample, such as an L2 norm of the weights. It
    counts once per step, not once per rank."""
    average: Average | UpdateAverages | None = None
    """An average of the weights over the steps, kept beside them: ``evener.ema(0.999)``, ``evener.swa(start=1000)``, or
    a function that ``torch.optim.swa_utils.AveragedModel`` takes as ``multi_avg_fn``. None: none."""
    forward: Forward = call_model
    """Function that maps the model and inputs to the outputs for the loss. If the model returns several values, select
    one here, as in ``lambda model, inputs: evener.call_model(model, inputs).logits``."""
    batch_size: int = 64
    """The global batch size, unless the run sets one."""
    epochs: int = 1
    """The number of epochs, unless the run sets one."""
    name: str = "task"
    """Name of the task in messages and directory names."""

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
        check_metrics(self.metrics, self.loss is not None)
        object.__setattr__(self, "average", as_average(self.average))
        taken = [name for name in self.metrics if name.startswith("average.")]
        if self.average is not None and taken:
            raise TaskError(
                f"Task.metrics has {taken[0]!r}; with Task.average, names that begin with 'average.' are those of the "
                "average's metrics: give it another name"
            )
        for name, (signature, optional) in _FUNCTIONS.items():
            check_function(name, getattr(self, name), signature, optional)
        object.__setattr__(self, "evaluate", with_own_place(self.evaluate, self.train))
        for name in ("train", "evaluate"):
            object.__setattr__(self, name, as_dataset(getattr(self, name)))
        check_cost(self.cost, self.train, self.partition)
        for name in ("batch_size", "epochs"):
            object.__setattr__(self, name, positive(name, getattr(self, name)))

    def exact_loss(self) -> Loss:
        """Returns the loss as a sum over terms.

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
"""For each of these fields, a description of its signature, and whether it may be None."""


TaskLike = Task | Callable[..., Task] | str
"""A task, a function that builds one, or the name ``package.module:function`` of such a function."""


def resolve(
    task: TaskLike, known: Mapping[str, str] | None = None, options: Mapping[str, Any] | None = None
) -> Callable[[], Task]:
    """Finds the function that builds a task, without calling it.

    Args:
        task: The task, its function, or its name.
        known: Maps short names to ``package.module:function``.
        options: Keyword arguments for the function.

    Returns:
        A function without arguments that builds the task. It raises TaskError if the result is not a :class:`Task`.

    Raises:
        TaskError: If there is no such task, or its function does not take these options.
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
