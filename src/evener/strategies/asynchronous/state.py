"""Gives all ranks the state of the parameter server at the end of a section: weights, buffers, optimizer."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evener.components.coalesce import broadcast_together
from evener.strategies.learner import Learner
from evener.strategies.running_moments import held_buffers


@torch.no_grad()
def share_state(learner: Learner, group: dist.ProcessGroup, nbytes: int) -> None:
    """Gives all ranks the weights, the buffers, and the optimizer's and the scheduler's state of rank 0. All ranks must
    call this together.

    Args:
        nbytes: The size of a message.
    """
    optimizer, parameters = learner.optimizer, list(learner.names)
    places = {parameter: place for place, parameter in enumerate(parameters)}
    is_source = learner.session.rank == 0
    scheduler = learner.stepper.scheduler
    schedule = None if scheduler is None else scheduler.state_dict()
    described = (*_described(optimizer, places), schedule) if is_source else None
    states, options, schedule = learner.session.control.broadcast_object(described)
    if not is_source:
        made = {
            parameters[place]: {key: _made(value, parameters[place]) for key, value in entries.items()}
            for place, entries in states.items()
        }
        optimizer.state = defaultdict(dict, made)
        for held, given in zip(optimizer.param_groups, options, strict=True):
            held.update(given)
        if scheduler is not None:
            scheduler.load_state_dict(schedule)
    tensors: list[Tensor] = [*parameters, *(buffer for _, _, buffer in held_buffers(learner.model))]
    for place in states:
        entries = optimizer.state[parameters[place]]
        tensors += [entries[key] for key, value in states[place].items() if isinstance(value, _Like)]
    broadcast_together([each for each in tensors if each.device == learner.session.device], group, 0, nbytes)
    elsewhere = [each for each in tensors if each.device != learner.session.device]
    for value, given in zip(elsewhere, learner.session.control.broadcast_object(elsewhere), strict=True):
        value.copy_(given)


class _Like:
    """A tensor of optimizer state: what another rank needs to make room for it."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.on_host = tensor.device.type == "cpu"


def _described(optimizer: torch.optim.Optimizer, places: dict[Any, int]) -> tuple[Any, Any]:
    states = {
        places[parameter]: {
            key: _Like(value) if isinstance(value, Tensor) else value for key, value in entries.items()
        }
        for parameter, entries in optimizer.state.items()
    }
    options = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return states, options


def _made(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, _Like):
        return value
    return torch.zeros(value.shape, dtype=value.dtype, device="cpu" if value.on_host else parameter.device)
