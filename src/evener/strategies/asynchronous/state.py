"""Gives all ranks the state of the parameter server at the end of a section: weights, buffers, optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.components.coalesce import broadcast_together
from evener.strategies.learner import Learner
from evener.strategies.running_moments import held_buffers


@torch.no_grad()
def share_state(
    learner: Learner, group: dist.ProcessGroup, owners: Mapping[nn.Parameter, int], nbytes: int
) -> None:
    """Gives all ranks the weights and optimizer state of their owners, and the buffers, the other parameters, and the
    state of the scheduler of rank 0. All ranks must call this together.

    Args:
        owners: The rank that has updated each trained parameter.
        nbytes: The size of a message.
    """
    optimizer, parameters = learner.optimizer, list(learner.names)
    places = {parameter: place for place, parameter in enumerate(parameters)}
    rank, control = learner.session.rank, learner.session.control
    found: list[tuple[Any, Any, Any]]
    scheduler = learner.stepper.scheduler
    schedule = {} if scheduler is None else scheduler.state_dict()
    own: dict[Any, bool] = {each: owners.get(each, 0) == rank for each in parameters}
    described = (*_described(optimizer, places, own), schedule) if any(own.values()) or not rank else None
    found = [each or ({}, [], {}) for each in control.gather_objects(described)]
    options, schedule = found[0][1:]
    if rank:
        for held, given in zip(optimizer.param_groups, options, strict=True):
            held.update(given)
        if scheduler is not None:
            scheduler.load_state_dict(schedule)
    state: dict[Any, Any] = {
        parameter: entries for parameter, entries in optimizer.state.items() if own.get(parameter)
    }
    for source, (states, _, _) in enumerate(found):
        if source != rank:
            for place, entries in states.items():
                made = {key: _made(value, parameters[place]) for key, value in entries.items()}
                state[parameters[place]] = made
        tensors: list[Tensor] = [each for each in parameters if owners.get(each, 0) == source]
        if not source:
            tensors += [buffer for _, _, buffer in held_buffers(learner.model)]
        for place in states:
            like = (key for key, value in states[place].items() if isinstance(value, _Like))
            tensors += [state[parameters[place]][key] for key in like]
        _broadcast(learner, group, tensors, source, nbytes)
    optimizer.state = defaultdict(dict, state)


def _broadcast(
    learner: Learner, group: dist.ProcessGroup, tensors: list[Tensor], source: int, nbytes: int
) -> None:
    """Gives all ranks the tensors of rank ``source``."""
    device = learner.session.device
    broadcast_together([each for each in tensors if each.device == device], group, source, nbytes)
    elsewhere = [each for each in tensors if each.device != device]
    if elsewhere:
        for value, given in zip(
            elsewhere, learner.session.control.broadcast_object(elsewhere, source), strict=True
        ):
            value.copy_(given)


class _Like:
    """A tensor of optimizer state: what another rank needs to make room for it."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.on_host = tensor.device.type == "cpu"


def _described(
    optimizer: torch.optim.Optimizer, places: dict[Any, int], own: Mapping[Any, bool]
) -> tuple[Any, Any]:
    states = {
        places[parameter]: {
            key: _Like(value) if isinstance(value, Tensor) else value for key, value in entries.items()
        }
        for parameter, entries in optimizer.state.items()
        if own.get(parameter)
    }
    options = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return states, options


def _made(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, _Like):
        return value
    return torch.zeros(value.shape, dtype=value.dtype, device="cpu" if value.on_host else parameter.device)
