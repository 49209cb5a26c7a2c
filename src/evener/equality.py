"""What must be the same on all ranks, compared once before anything travels.

A rank that trains another model, or on other data, is no error that anybody would see: collectives of equal sizes add
up unequal things, and samples are lost or counted twice. So the ranks tell each other once what they are about to do.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset

from evener.config import RunConfig
from evener.errors import ConfigurationError
from evener.runtime.session import Session
from evener.strategies.model import signature
from evener.task import Task

Facts = Mapping[str, Any]
"""What a rank is about to do, in words that the error can use."""

_OWN = {"run_dir", "resume", "device", "processes", "workers"}
"""Settings that a machine may have of its own."""


def facts_of(task: Task, config: RunConfig, model: nn.Module) -> dict[str, Any]:
    """What this rank is about to do."""
    settings = {name: value for name, value in config.as_dict().items() if name not in _OWN}
    tensors = signature(model)
    return {
        **{f"setting {name}": value for name, value in settings.items()},
        "Task.batch_size": task.batch_size,
        "Task.epochs": task.epochs,
        "Task.partition": task.partition,
        "length of the training set": _length(task.train, task.partition),
        "length of the evaluation set": _length(task.evaluate, task.partition),
        "number of tensors in the model": len(tensors),
        "names, types and shapes of the model's tensors (a checksum)": zlib.crc32(
            json.dumps(tensors).encode()
        ),
    }


def agreement(task: Task, config: RunConfig, session: Session) -> Callable[[nn.Module], None]:
    """What compares the task and its model with those of all ranks, which do so together."""

    def agree(model: nn.Module) -> None:
        check_equal(session.control.gather_objects(facts_of(task, config, model)))

    return agree


def _length(dataset: Any, partition: str) -> Any:
    """None where ranks may have different ones."""
    if partition == "sample" or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return None
    return len(dataset)


def check_equal(facts: Sequence[Facts]) -> None:
    """Compares the facts of all ranks, in order of rank.

    Raises:
        ConfigurationError: If they differ; names what differs and on which ranks.
    """
    first = facts[0]
    for name in first:
        values = [fact.get(name) for fact in facts]
        if any(value != values[0] for value in values):
            seen = ", ".join(f"{value} on {_ranks(values, value)}" for value in _distinct(values))
            raise ConfigurationError(
                f"the ranks do not train the same: {name} is {seen}. Every rank must build the same task from the same "
                'data; data that hosts hold apart are said by Task(partition="sample")'
            )


def _distinct(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _ranks(values: Sequence[Any], value: Any) -> str:
    ranks = [rank for rank, other in enumerate(values) if other == value]
    shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
