"""Lets optimizers that look at whole weights, such as Muon and Shampoo, update a model that is divided.

Which weights these are is found before the model is divided, because ``sharded`` with ``zero=1`` and ``2`` then leaves
them whole at their owners: the task's optimizer is built once for a model on the meta device, and asked. The ranks also
tell each other their speed and memory, by which owners are chosen.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from evener.components.build import build_optimizer, what_is_asked_for
from evener.components.optim.elementwise import SAYS_ELEMENTWISE, looks_across, updated_whole
from evener.components.optim.stand_ins import is_updated_whole, model_parameter
from evener.components.optim.whole_updates import OwnershipTerms, WholeUpdates
from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.core.config.offload import OPTIMIZER
from evener.core.task.task import Task
from evener.errors import ConfigurationError
from evener.hardware import accelerators
from evener.hardware.memory_size import memory_nbytes
from evener.hardware.speed import product_speed
from evener.hardware.survey.host import processor_name
from evener.nn.fqn import clean_name
from evener.strategies.learner import Learner
from evener.torch_internals.dispatch import active_fake_mode

_STEPS_OF_SPEED = 4
"""Measured speeds are rounded to so many steps for a doubling, so that noise does not make equal ranks unequal."""


def ownership_terms(task: Task, model: nn.Module, learner: Learner) -> OwnershipTerms:
    """Returns which weights of the undivided ``model`` the task's optimizer updates as wholes, and what the ranks can
    do. All ranks must call this together.

    Raises:
        ConfigurationError: If an update depends on several weights at once, or on random numbers.
    """
    optimizer = _tried(task, model)
    if optimizer is None:
        return OwnershipTerms()
    names: dict[Tensor, str] = {each: clean_name(name) for name, each in model.named_parameters()}
    return terms_for(optimizer, names, learner)


def terms_for(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], learner: Learner
) -> OwnershipTerms:
    """Returns which weights the optimizer updates as wholes, and what the ranks can do. All ranks must call this
    together.

    Args:
        names: The names of the model's parameters.

    Raises:
        ConfigurationError: As :func:`ownership_terms`.
    """
    found = updated_whole(optimizer)
    if not found:
        return OwnershipTerms()
    if active_fake_mode() is None and looks_across(optimizer):
        raise ConfigurationError(
            f"{type(optimizer).__name__} looks at several weights at once, or draws random numbers, and each rank of "
            f"strategy {learner.name!r} would update some of the weights: use strategy 'ddp', whose ranks update all"
        )
    rows = learner.session.control.gather_objects((_place(learner), _memory(learner)))
    places = [place for place, _ in rows]
    speeds = [1.0] * len(rows)
    if len(set(places)) > 1:
        speeds = _rounded(learner.session.control.gather_objects(_speed(learner)))
    if learner.settings.throttle is not None:
        speeds = [speed * learner.settings.throttle.factor(0, rank) for rank, speed in enumerate(speeds)]
    named = frozenset(names[parameter] for parameter in found if parameter in names)
    return OwnershipTerms(named, tuple(speeds), tuple(memory for _, memory in rows))


def _tried(task: Task, model: nn.Module) -> torch.optim.Optimizer | None:
    """Builds the task's optimizer for the undivided model. Returns None if that fails: it may need real numbers."""
    try:
        with warnings.catch_warnings(action="ignore"):
            optimizer = task.optimizer(what_is_asked_for(task.optimizer, model))
    except Exception:  # the error comes again, and is reported, when it is built for the divided model
        return None
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None


def _place(learner: Learner) -> tuple[str, str, int]:
    """Returns what makes ranks equally fast: the device, or the processor and its threads."""
    device = learner.session.device
    if accelerators.is_accelerator(device):
        return device.type, accelerators.name_of(device), 0
    return device.type, processor_name(), torch.get_num_threads()


def _speed(learner: Learner) -> float:
    device = learner.session.device
    return product_speed(device, "float32") if active_fake_mode() is None else 1.0


def _rounded(speeds: list[float]) -> list[float]:
    exponents = [round(_STEPS_OF_SPEED * torch.tensor(speed / max(speeds)).log2().item()) for speed in speeds]
    return [2.0 ** (exponent / _STEPS_OF_SPEED) for exponent in exponents]


def _memory(learner: Learner) -> float:
    session, limits = learner.session, learner.settings.limits
    limit = limits.limit_for(session.rank, 0) if limits is not None else None
    have = memory_nbytes(session.device, session.environment.local_world_size)
    return float(min(have, limit or have))


def build_divided(learner: Learner, model: nn.Module) -> torch.optim.Optimizer:
    """Builds the optimizer of a model that may be divided. Weights that it updates as wholes get
    ``learner.whole_updates``. All ranks must call this together.

    Raises:
        ConfigurationError: If it updates pieces of weights at which it must look as wholes.
    """
    names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    if learner.ownership.names:
        control, device = learner.session.control, learner.session.device
        updates = WholeUpdates(model, names, learner.ownership, learner.mesh, control.gather_objects, device)
        optimizer = updates.build(lambda: build_optimizer(learner.task, model))
        learner.whole_updates = updates
        _check(learner, updates)
    else:
        optimizer = build_optimizer(learner.task, model)
    check_pieces(optimizer, learner.name)
    return optimizer


def check_pieces(optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Raises ConfigurationError if the optimizer looks at whole weights and holds pieces of some."""
    for parameter in updated_whole(optimizer):
        if shard_spec(model_parameter(parameter)) is not None and not is_updated_whole(parameter):
            raise ConfigurationError(
                f"{type(optimizer).__name__} may look at a weight as a whole, but each rank of strategy {strategy!r} "
                "holds a slice. Let Task.optimizer build it, also for a model on the meta device; or, if it treats "
                f"each element alone, as SGD and AdamW do, give it an attribute {SAYS_ELEMENTWISE} = True"
            )


def _check(learner: Learner, updates: WholeUpdates) -> None:
    settings = learner.settings
    asked = {
        f"optimizer_state={settings.optimizer_state}": settings.optimizer_state is not None,
        "update_in_backward": updates.gathers and settings.update_in_backward,
        "offload optimizer, unless owners hold whole weights, as with sharded and zero=2": updates.gathers
        and OPTIMIZER in settings.offload.kinds,
    }
    for what in (what for what, is_asked in asked.items() if is_asked):
        raise ConfigurationError(
            f"{type(updates.optimizer).__name__} looks at whole weights, of which each rank of strategy "
            f"{learner.name!r} holds a slice, and that does not go with {what}: leave it out"
        )
