"""Factories of ``transformers`` optimizers and schedulers for the parameters of a rank's own model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers import Trainer as TheirTrainer
from transformers import TrainingArguments, get_scheduler

from evener.errors import ConfigurationError

Make = Callable[[Any], Any]


def optimizer_of(
    model: nn.Module, args: TrainingArguments, given: tuple[type, dict[str, Any]] | None
) -> Make:
    """Returns a factory of the optimizer in ``given`` or named by ``args``. Biases and norms get no weight decay."""
    kind, options = given or TheirTrainer.get_optimizer_cls_and_kwargs(args, model)
    options = {name: value for name, value in options.items() if name != "fused"}  # set by Evener
    decaying = set(TheirTrainer.get_decay_parameter_names(None, model))

    def make(named_parameters: Any) -> torch.optim.Optimizer:
        named = [(name, p) for name, p in named_parameters if p.requires_grad]
        groups = [
            {"params": [p for name, p in named if name in decaying], "weight_decay": args.weight_decay},
            {"params": [p for name, p in named if name not in decaying], "weight_decay": 0.0},
        ]
        made: torch.optim.Optimizer = kind(groups, **options)
        return made

    return make


def scheduler_of(args: TrainingArguments, steps: int) -> Make:
    """Returns a factory of the scheduler that ``args`` name, for a run of ``steps`` steps."""
    return lambda optimizer: get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        args.get_warmup_steps(steps),
        steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )


def made_again(optimizer: torch.optim.Optimizer, model: nn.Module) -> Make:
    """Returns a factory that makes the same optimizer for another copy of ``model``. Parameters are matched by name.

    Raises:
        ConfigurationError: If ``optimizer`` has taken a step, or has parameters that are not the model's.
    """
    if optimizer.state:
        raise ConfigurationError(
            f"the {type(optimizer).__name__} in optimizers= has state of steps that it took; give one that took none"
        )
    names = {parameter: name for name, parameter in model.named_parameters()}
    foreign = sum(p not in names for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ConfigurationError(
            f"{foreign} parameters of the {type(optimizer).__name__} in optimizers= are not the model's; make it from "
            "model.parameters()"
        )
    kind = type(optimizer)
    taken = inspect.signature(kind).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in taken}
    groups = [
        {**_as_begun(group), "params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]

    def make(named_parameters: Any) -> torch.optim.Optimizer:
        own = dict(named_parameters)
        mine = [{**group, "params": [own[name] for name in group["params"]]} for group in groups]
        return kind(mine, **defaults)

    return make


def _as_begun(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a parameter group with the learning rate that it had before a scheduler changed it."""
    kept = {name: value for name, value in group.items() if name != "initial_lr"}
    return {**kept, "lr": group.get("initial_lr", group["lr"])}


def bound_again(scheduler: LRScheduler) -> Make:
    """Returns a factory that makes the same scheduler for another optimizer.

    Raises:
        ConfigurationError: If ``scheduler`` has taken a step, its constructor arguments cannot be read from its
            attributes, or it is a ``ReduceLROnPlateau``.
    """
    kind = type(scheduler)
    if getattr(scheduler, "last_epoch", 0) > 0:
        raise ConfigurationError(
            f"the {kind.__name__} in optimizers= has taken {scheduler.last_epoch} steps; give one that took none"
        )
    known = {**vars(scheduler), "lr_lambda": getattr(scheduler, "lr_lambdas", None)}
    first, *others = inspect.signature(kind).parameters
    options = [name for name in others if name not in ("last_epoch", "verbose")]
    is_told = first == "optimizer" and all(name in known for name in options)
    if not is_told or isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigurationError(
            f"a {kind.__name__} in optimizers= is not honoured by Evener's Trainer, which makes another for the "
            "optimizer of each rank; give a scheduler of steps alone, such as transformers.get_scheduler makes"
        )
    given = {name: known[name] for name in options}
    return lambda optimizer: kind(optimizer, **given)
