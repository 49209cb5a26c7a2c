"""What of a rank's memory is weights, gradients, state of the optimizer: said to an accounting, from the learner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from evener.data.batch import Batch, map_leaves
from evener.hardware.memory import Accounting, made_as
from evener.hardware.memory.counters import BUFFERS, GRADIENTS, INPUTS, OPTIMIZER, OTHER, PARAMETERS
from evener.strategies.learner import Learner
from evener.torch_internals.module_tensors import own_buffers
from evener.torch_internals.storages import address, memory_of


def name_model(account: Accounting, learner: Learner) -> None:
    """Parameters, buffers and what the optimizer holds for them, as they are now."""
    account.name(PARAMETERS, learner.model.parameters())
    account.name(BUFFERS, (b for m in learner.model.modules() for b in own_buffers(m).values()))
    account.name(OPTIMIZER, _state_of(learner))


def name_inputs(account: Accounting, batch: Batch) -> None:
    """The samples of a batch."""
    for micro in batch.micro_batches:
        account.name(INPUTS, [*_tensors_of(micro.inputs), *_tensors_of(micro.targets)])


@contextmanager
def updates_named(account: Accounting, learner: Learner) -> Iterator[None]:
    """In the block every update says what are gradients, which are there then, and what the optimizer keeps."""
    making = ExitStack()

    optimizer = learner.optimizer

    def before(updating: torch.optim.Optimizer, *_: Any) -> None:
        # In backward it is one parameter's.
        named = learner.model.parameters() if updating is optimizer else _updated(updating)
        account.name(GRADIENTS, (p.grad for p in named))
        making.enter_context(made_as(OTHER))

    def after(updating: torch.optim.Optimizer, *_: Any) -> None:
        making.close()
        if updating is optimizer:
            name_model(account, learner)
        else:
            account.name(OPTIMIZER, _tensors_of([optimizer.state.get(p) for p in _updated(updating)]))

    hooks = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    try:
        yield
    finally:
        making.close()
        for hook in hooks:
            hook.remove()


def _updated(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(learner: Learner) -> Iterator[Tensor]:
    """Those that are there."""
    return (p.grad for p in learner.model.parameters() if p.grad is not None)


def nbytes_of(learner: Learner) -> dict[str, int]:
    """Bytes of the rank's device that it holds all the time, with the gradients that are there now.

    What lies in one memory, such as gradients in a bucket, counts once, and for the first that has it.
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
    """Bytes of the samples of a batch; of a view its own part."""
    leaves = (leaf for micro in batch.micro_batches for leaf in _tensors_of((micro.inputs, micro.targets)))
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
    """Of the optimizer, but for what is outside."""
    found = _tensors_of(list(learner.optimizer.state.values()))
    return [tensor for tensor in found if not learner.offloaded.holds(tensor)]


def _is_on(device: torch.device, tensor: Tensor) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _tensors_of(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def take(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        return leaf

    map_leaves(take, tree)
    return found
