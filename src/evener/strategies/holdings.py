"""What of a rank's memory is weights, gradients, state of the optimizer: said to an accounting, from the learner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from evener.borrowed.module_tensors import own_buffers
from evener.data.batch import Batch, map_leaves
from evener.memory import Accounting, made_as
from evener.memory.tally import BUFFERS, GRADIENTS, INPUTS, OPTIMIZER, OTHER, PARAMETERS
from evener.strategies.learner import Learner
from evener.strategies.local import local


def name_model(account: Accounting, learner: Learner) -> None:
    """Parameters, buffers and what the optimizer holds for them, as they are now."""
    account.name(PARAMETERS, learner.model.parameters())
    account.name(BUFFERS, (b for m in learner.model.modules() for b in own_buffers(m).values()))
    account.name(OPTIMIZER, _tensors_of(list(learner.optimizer.state.values())))


def name_inputs(account: Accounting, batch: Batch) -> None:
    """The samples of a batch."""
    for micro in batch.micro_batches:
        account.name(INPUTS, [*_tensors_of(micro.inputs), *_tensors_of(micro.targets)])


@contextmanager
def updates_named(account: Accounting, learner: Learner) -> Iterator[None]:
    """In the block every update says what are gradients, which are there then, and what the optimizer keeps."""
    making = ExitStack()

    def before(*_: Any) -> None:
        account.name(GRADIENTS, (p.grad for p in learner.model.parameters()))
        making.enter_context(made_as(OTHER))

    def after(*_: Any) -> None:
        making.close()
        name_model(account, learner)

    optimizer = learner.optimizer
    hooks = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    try:
        yield
    finally:
        making.close()
        for hook in hooks:
            hook.remove()


def nbytes_of(learner: Learner) -> dict[str, int]:
    """Bytes that a rank holds all the time."""
    model, state = learner.model, list(learner.optimizer.state.values())
    return {
        PARAMETERS: _sum(model.parameters()),
        BUFFERS: _sum(b for m in model.modules() for b in own_buffers(m).values() if b is not None),
        GRADIENTS: _sum(p for p in model.parameters() if p.requires_grad),
        OPTIMIZER: _sum(_tensors_of(state)),
    }


def _sum(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors if tensor.layout is torch.strided)


def _tensors_of(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def take(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        return leaf

    map_leaves(take, tree)
    return found
