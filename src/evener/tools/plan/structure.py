"""A fingerprint of what a task builds, to tell whether a plan is of the same model and samples."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

from evener.core.task.task import Task
from evener.data.batch import leaves_of
from evener.tools.plan.fitting import model_without_numbers
from evener.tools.plan.trials import quiet


def structure_of(task: Task) -> str:
    """Returns a fingerprint of what a task builds, no values: types and shapes of its model and optimizer, a point, and
    those of its samples."""
    model = model_without_numbers(task)
    with quiet(), torch.random.fork_rng(devices=[]):
        facts = [
            [(name, type(each).__qualname__) for name, each in model.named_modules()],
            [_tensor(name, each) for name, each in model.named_parameters()],
            [_tensor(name, each) for name, each in model.named_buffers()],
            [type(task.loss).__qualname__, task.partition, task.penalty is None, task.average is None],
            _optimizer(task, model),
        ]
        return f"{_hash(facts)}.{_hash(_samples(task))}"


def is_other_model(structure: str, task: Task) -> bool:
    """Returns True if a fingerprint is of another model or optimizer than the task's, whatever the samples."""
    return structure.partition(".")[0] != structure_of(task).partition(".")[0]


def _hash(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def _tensor(name: str, tensor: Tensor) -> list[Any]:
    return [name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad]


def _samples(task: Task) -> list[Any]:
    """Returns the number of samples, and types and shapes of the first; nothing of a stream."""
    try:
        leaves = leaves_of(task.train[0])
        return [len(task.train), *map(_leaf, leaves)]  # type: ignore[arg-type]
    except Exception:
        return [type(task.train).__qualname__]


def _leaf(leaf: Any) -> Any:
    return [type(leaf).__qualname__, list(getattr(leaf, "shape", ())), str(getattr(leaf, "dtype", ""))]


def _optimizer(task: Task, model: nn.Module) -> list[Any]:
    """Returns the type of the optimizer, and the choices on which its state and its speed depend."""
    try:
        made = task.optimizer(list(model.parameters()))
    except Exception:  # it wants names or the model, or refuses tensors without numbers
        return [getattr(task.optimizer, "__qualname__", "")]
    momentum = bool(made.defaults.get("momentum"))
    switches = sorted((name, each) for name, each in made.defaults.items() if isinstance(each, bool))
    return [type(made).__qualname__, momentum, switches, [len(each["params"]) for each in made.param_groups]]
