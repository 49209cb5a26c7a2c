"""Attributes a rank's memory to parameters, buffers, gradients, optimizer state and inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from evener.components.build import held_by
from evener.data.batch import Batch, tensors_in
from evener.hardware.memory import MemoryTracker, made_as
from evener.hardware.memory.counters import BUFFERS, GRADIENTS, INPUTS, OPTIMIZER, OTHER, PARAMETERS
from evener.strategies.learner import Learner
from evener.torch_internals.modules import own_buffers
from evener.torch_internals.storages import address, memory_of


def name_model(account: MemoryTracker, learner: Learner) -> None:
    """Registers the model's parameters, buffers and optimizer state with the memory tracker, as they are now."""
    account.name(PARAMETERS, learner.model.parameters())
    account.name(BUFFERS, (b for m in learner.model.modules() for b in own_buffers(m).values()))
    account.name(OPTIMIZER, _state_of(learner))


def name_inputs(account: MemoryTracker, batch: Batch) -> None:
    """Registers the samples of a batch with the memory tracker."""
    for micro in batch.micro_batches:
        account.name(INPUTS, [*tensors_in(micro.inputs), *tensors_in(micro.targets)])


@contextmanager
def updates_named(account: MemoryTracker, learner: Learner) -> Iterator[None]:
    """Within the block, every optimizer step registers gradients and new optimizer state with the memory tracker."""
    making = ExitStack()

    optimizer = learner.optimizer

    def before(updating: torch.optim.Optimizer, *_: Any) -> None:
        # With updates in backward, the optimizer holds one parameter.
        named = learner.model.parameters() if updating is optimizer else held_by(updating)
        account.name(GRADIENTS, (p.grad for p in named))
        making.enter_context(made_as(OTHER))

    def after(updating: torch.optim.Optimizer, *_: Any) -> None:
        making.close()
        if updating is optimizer:
            name_model(account, learner)
        else:
            account.name(OPTIMIZER, tensors_in([optimizer.state.get(p) for p in held_by(updating)]))

    hooks = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    try:
        yield
    finally:
        making.close()
        for hook in hooks:
            hook.remove()


def gradients_of(learner: Learner) -> Iterator[Tensor]:
    """Returns the gradients that exist now."""
    return (p.grad for p in learner.model.parameters() if p.grad is not None)


def nbytes_of(learner: Learner) -> dict[str, int]:
    """Returns the bytes on the rank's device of parameters, buffers, optimizer state and existing gradients.

    Tensors that share storage, such as gradients in a bucket, count once, in the first category that has them.
    """
    model, device = learner.model, learner.session.device
    held: dict[str, Iterable[Tensor | None]] = {
        PARAMETERS: model.parameters(),
        BUFFERS: (b for m in model.modules() for b in own_buffers(m).values()),
        OPTIMIZER: _state_of(learner),
        GRADIENTS: gradients_of(learner),
    }
    seen: set[int] = set()
    return {category: _storages(tensors, device, seen) for category, tensors in held.items()}


def nbytes_of_inputs(batch: Batch, device: torch.device) -> int:
    """Returns the bytes of a batch's samples on ``device``. Of a view, only its own part counts."""
    leaves = (leaf for micro in batch.micro_batches for leaf in tensors_in((micro.inputs, micro.targets)))
    return sum(leaf.nbytes for leaf in leaves if _is_on(device, leaf) and leaf.layout is torch.strided)


def _storages(tensors: Iterable[Tensor | None], device: torch.device, seen: set[int]) -> int:
    nbytes = 0
    for tensor in tensors:
        for part in () if tensor is None else memory_of(tensor):
            storage = part.untyped_storage()
            if _is_on(device, part) and address(storage) not in seen:
                seen.add(address(storage))
                nbytes += storage.nbytes()
    return nbytes


def _state_of(learner: Learner) -> list[Tensor]:
    """Returns the optimizer state that is not offloaded."""
    found = tensors_in(list(learner.optimizer.state.values()))
    return [tensor for tensor in found if not learner.offloaded.holds(tensor)]


def _is_on(device: torch.device, tensor: Tensor) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)
