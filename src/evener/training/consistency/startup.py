"""Compares what must be the same on all ranks, once, before any gradient is exchanged.

If a rank trains another model, or on other data, nobody would notice: collectives of equal sizes sum unlike things, and
samples are lost or counted twice. So the ranks exchange a description of what they are about to train.
"""

from __future__ import annotations

import json
import platform
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from evener.components.model_init import named_tensors
from evener.components.optim.stand_ins import model_parameter
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.data.fingerprint import Fingerprint, difference, fingerprint
from evener.data.shard_counts import COUNTS, count_together
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.training.consistency.task_description import described

Facts = Mapping[str, Any]
"""Description of what a rank is about to train, with names that error messages can use."""

OWN_SETTINGS = frozenset(
    (
        "run_dir",
        "resume",
        "weights",
        "overwrite",
        "device",
        "processes",
        "workers",
        "offload_to",
        "notice_command",
        "metrics_file",
    )
)
"""Settings that may differ between machines."""


_OF_DEVICE = {"params", "foreach", "fused", "capturable"}
"""Options of an optimizer's groups that may differ between devices."""
_FORM = "the model"
_OPTIONAL = ("evaluate", "penalty", "scheduler", "collate", "average", "cost")
"""Optional parts of a task."""


def facts_of(task: Task, config: RunConfig, model: nn.Module, backend: str = "") -> dict[str, Any]:
    """Describes what this rank is about to train."""
    settings = {name: value for name, value in config.as_dict().items() if name not in OWN_SETTINGS}
    return {
        **{f"setting {name}": value for name, value in settings.items()},
        "the version of torch": torch.__version__.partition("+")[0],
        "the backend": backend,
        "Task.batch_size": task.batch_size,
        "Task.epochs": task.epochs,
        "Task.partition": task.partition,
        "Task.metrics": sorted(task.metrics or ()),
        "Task.scheduler_interval": task.scheduler_interval,
        **{f"a {part} of the task": getattr(task, part) is not None for part in _OPTIONAL},
        **_functions_of(task),
        "length of the training set": _length(task.train, task.partition),
        "length of the evaluation set": _length(task.evaluate, task.partition),
        _FORM: zlib.crc32(json.dumps(form_of(model)).encode()),
    }


def _functions_of(task: Task) -> dict[str, Any]:
    """Describes the functions of a task, without ``collate`` if ranks own their data, because it may hold some."""
    names = ("loss", "metrics", "penalty", "forward", *(("collate",) if task.partition == "batch" else ()))
    parts = [described(getattr(task, name), f"Task.{name}") for name in (*names, "average")]
    return {name: value for part in parts for name, value in part.items()}


def form_of(model: nn.Module) -> list[str]:
    """Describes a model in lines: dtype, shape and ties of its tensors in order, and its modules.

    PyTorch's own modules are listed with their options. Values are not compared, because all ranks get those of rank 0.
    """
    seen: dict[int, str] = {}
    tensors = [
        f"{name}: {str(tensor.dtype).removeprefix('torch.')} of {tuple(tensor.shape)}"
        f"{'' if tensor.requires_grad else ', not trained'}{_tie(seen.setdefault(id(tensor), name), name)}"
        for name, tensor in named_tensors(model).items()
    ]
    return [*tensors, *(f"{name or 'all'}: {_kind(module)}" for name, module in model.named_modules())]


def _tie(first: str, name: str) -> str:
    return "" if first == name else f", the same as {first}"


def _kind(module: nn.Module) -> str:
    """Describes a module. Only PyTorch's own modules have known options."""
    kind = type(module)
    return f"{kind.__qualname__}({module.extra_repr() if kind.__module__.startswith('torch.nn.') else ''})"


def agreement(task: Task, config: RunConfig, session: Session) -> Callable[[nn.Module], None]:
    """Returns a function that compares the task and its model on all ranks. All ranks must call both together.

    Counts the samples of shards before, so that the data sets have lengths.
    """
    count_together(
        {"training set": task.train, "evaluation set": task.evaluate},
        session.rank,
        session.control.gather_objects,
        config.run_dir and config.run_dir / COUNTS,
        config.timeout_seconds / 2,
        task.partition == "batch",
    )

    def agree(model: nn.Module) -> None:
        backend = dist.get_backend(session.world) if session.world is not None else ""
        facts: list[Facts] = session.control.gather_objects(facts_of(task, config, model, backend))
        check_equal([{**fact, _FORM: 0} for fact in facts])
        if len({fact[_FORM] for fact in facts}) > 1:
            check_forms(session.control.gather_objects(form_of(model)))
        if config.check_data is None:  # otherwise more samples are compared
            check_samples(session.control.gather_objects(_samples_of(task)))
        builds = session.control.gather_objects((platform.python_version(), torch.__version__))
        if session.rank == 0:
            warn_of_builds(builds)

    return agree


def warn_of_builds(builds: Sequence[tuple[str, str]]) -> None:
    """Warns if the ranks' versions of Python or builds of torch differ. They may still work together.

    A version of Python may not read what another has pickled. Builds of torch (``2.13.0+cpu``, ``2.13.0+cu130``) have
    different kernels. Hosts of different kinds need that, and a sum is right whichever rank rounded its terms.
    """
    pythons, torches = ([str(each) for each in column] for column in zip(*builds, strict=True))
    if len(set(pythons)) > 1:
        warnings.warn(f"the ranks run different versions of Python: {_listed(pythons)}", stacklevel=2)
    if len(set(torches)) > 1:
        warnings.warn(
            f"the ranks run different builds of torch: {_listed(torches)}. A sum has the same bits on all; "
            "but what a rank computes may be rounded otherwise, so that a run with other shares has other last bits",
            stacklevel=2,
        )


def _samples_of(task: Task) -> dict[str, Fingerprint]:
    """Returns digests of a few samples; none if ranks own their data."""
    if task.partition == "sample":
        return {}
    return {"training set": fingerprint(task.train), "evaluation set": fingerprint(task.evaluate)}


def check_samples(rows: Sequence[Mapping[str, Fingerprint]]) -> None:
    """Compares the few samples of all ranks, by rank.

    Raises:
        ConfigurationError: Names the first sample that differs on some rank.
    """
    for name, of_first in rows[0].items():
        for rank, row in enumerate(rows):
            if found := difference(of_first, row[name]):
                raise ConfigurationError(
                    f"the ranks do not train the same: {found} in the {name} of rank 0 and rank {rank}. Every rank "
                    "must build the same data: draw what is random with a seed (torch.Generator().manual_seed(0)); "
                    'data that hosts hold apart are said by Task(partition="sample")'
                )


def check_forms(forms: Sequence[Sequence[str]]) -> None:
    """Compares the models of all ranks line by line.

    Raises:
        ConfigurationError: Names the first line that differs, on each rank.
    """
    lines = zip_longest(*forms, fillvalue="nothing more")
    first = next((list(line) for line in lines if len(set(line)) > 1), None)
    if first is not None:
        raise ConfigurationError(
            f"the ranks do not train the same model: {_listed(first)}. Every rank must build the same model, with "
            "the same tensors in the same order"
        )


def agree_on_optimizer(
    optimizer: torch.optim.Optimizer, scheduler: Any, names: Mapping[nn.Parameter, str], session: Session
) -> None:
    """Compares optimizer and scheduler on all ranks. All ranks must call this together.

    Raises:
        ConfigurationError: As :func:`check_equal`.
    """
    check_equal(session.control.gather_objects(facts_of_optimizer(optimizer, scheduler, names)))


def agree_on_functions(functions: Sequence[Any], session: Session) -> None:
    """Compares losses and schedulers, in their order, on all ranks. All ranks must call this together.

    Raises:
        ConfigurationError: As :func:`check_equal`.
    """
    facts: dict[str, Any] = {"the number of losses and schedulers": len(functions)}
    for place, function in enumerate(functions):
        facts |= described(function, f"loss or scheduler {place}")
    check_equal(session.control.gather_objects(facts))


def facts_of_optimizer(
    optimizer: torch.optim.Optimizer, scheduler: Any, names: Mapping[nn.Parameter, str]
) -> dict[str, Any]:
    """Describes an optimizer by its class, its groups and their options, and its scheduler."""
    facts: dict[str, Any] = {
        "the optimizer": type(optimizer).__qualname__,
        **described(scheduler, "the scheduler"),
        **_options_beside(optimizer),
        "the number of the optimizer's groups": len(optimizer.param_groups),
    }
    for place, group in enumerate(optimizer.param_groups):
        held = [names.get(model_parameter(parameter), "?") for parameter in group["params"]]
        facts[f"the number of parameters in the optimizer's group {place}"] = len(held)
        for number, name in enumerate(held):
            facts[f"parameter {number} in the optimizer's group {place}"] = name
        for key in sorted(group.keys() - _OF_DEVICE):
            facts[f"{key} in the optimizer's group {place}"] = _plain(group[key])
    return facts


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "a tensor" if value.is_meta else value.tolist()
    if isinstance(value, int | float | str | tuple | None):
        return value
    return str(value) if isinstance(value, list | dict) else type(value).__qualname__


def _options_beside(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns plain attributes that an optimizer has outside of its groups."""
    usual = vars(torch.optim.SGD([torch.zeros(1)]))
    own = {key: value for key, value in vars(optimizer).items() if key not in usual}
    return {
        f"{key} of the optimizer": value
        for key, value in own.items()
        if isinstance(value, bool | int | float | str | tuple | None) and not key.startswith("__")
    }


def _length(dataset: Any, partition: str) -> Any:
    """Returns the length of a dataset, or None if ranks may have different ones."""
    if partition == "sample" or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return None
    return len(dataset)


def check_equal(facts: Sequence[Facts]) -> None:
    """Compares the facts of all ranks, in order of rank.

    Raises:
        ConfigurationError: If they differ; names what differs and on which ranks.
    """
    for name in dict.fromkeys(name for fact in facts for name in fact):
        values = [fact.get(name) for fact in facts]
        if any(value != values[0] for value in values):
            raise ConfigurationError(
                f"the ranks do not train the same: {name} is {_listed(values)}. Every rank must build the same task "
                'from the same data; data that hosts hold apart are said by Task(partition="sample")'
            )


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(f"{value} on {_ranks(values, value)}" for value in _distinct(values))


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
