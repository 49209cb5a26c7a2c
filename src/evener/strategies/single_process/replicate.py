"""Replicas of a model on other devices of the same process, which are kept equal to the model.

A replica in the same memory as the model, as on logical CPU devices, shares the model's weights. It has gradients and
buffers of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor, nn

from evener.components.checks.param_hooks import COPIED, refuse_hooks
from evener.components.model_with_loss import Replica
from evener.core.half_precision import widened
from evener.errors import TaskError
from evener.hardware import async_copy
from evener.strategies.single_process.devices import same
from evener.torch_internals.autograd import version
from evener.torch_internals.modules import own_buffers

_PLAIN = (bool, int, float, str, type(None))
"""Types of module attributes that a replica copies before every pass."""


def copied(model: nn.Module, device: torch.device) -> nn.Module:
    """Returns a replica of the model on ``device``.

    Raises:
        TaskError: If the model cannot be copied, or has hooks on parameters, which copies of these lack.
    """
    refuse_hooks(model, "data_parallel", COPIED)
    try:
        made = copy.deepcopy(model)
    except Exception as error:
        raise TaskError(
            f"the model {type(model).__name__} cannot be copied to {device} ({type(error).__name__}: {error}); keep "
            "what copy.deepcopy refuses out of its modules, or use 'ddp', where each process builds its own"
        ) from error
    follow(model, made)
    for theirs in made.parameters():
        theirs.grad = None
        if not same(theirs.device, device):
            theirs.data = theirs.data.to(device)
    for module in made.modules():
        held = own_buffers(module)
        held.update({name: tensor if tensor is None else tensor.to(device) for name, tensor in held.items()})
    return made


@torch.no_grad()
def follow(model: nn.Module, other: nn.Module) -> None:
    """Copies the model's weights, buffers and plain module attributes (also ``training``) to ``other``."""
    for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
        theirs.requires_grad_(own.requires_grad)
        if not same(own.device, theirs.device):
            async_copy.copy_tensor(theirs, own)
        elif own.data_ptr() != theirs.data_ptr():
            theirs.data = own.data
    take_buffers(model, other)
    for module, its in zip(model.modules(), other.modules(), strict=True):
        vars(its).update({key: value for key, value in vars(module).items() if isinstance(value, _PLAIN)})


@contextmanager
def no_writes(replica: Replica, devices: int) -> Iterator[None]:
    """Refuses a forward pass that writes to the weights of one of several replicas, as for a copy that follows them.

    Raises:
        TaskError: If a weight was written to.
    """
    weights = replica.model.named_parameters() if devices > 1 else ()
    before = [(name, weight, version(weight)) for name, weight in weights]
    yield
    for name, weight, seen in before:
        if version(weight) != seen:
            raise TaskError(
                f"the model writes to its weight {name} in forward, and with strategy 'data_parallel' each device "
                "would write to it, or to a copy that is lost. Write to weights after an update, by the optimizer's "
                "register_step_post_hook, or use strategy 'ddp'"
            )


@torch.no_grad()
def take_buffers(model: nn.Module, other: nn.Module) -> None:
    """Copies the model's buffers to ``other``, in place if shape and layout are unchanged."""
    for module, its in zip(model.modules(), other.modules(), strict=True):
        theirs = own_buffers(its)
        for name, own in own_buffers(module).items():
            held = theirs.get(name)
            if own is None or held is None or held.shape != own.shape or held.layout != own.layout:
                theirs[name] = own if own is None else _like(own, held)
            else:
                async_copy.copy_tensor(held, own)


def _like(own: Tensor, held: Tensor | None) -> Tensor:
    return own.clone() if held is None else own.to(held.device, copy=True)


@torch.no_grad()
def add_gradients(models: Sequence[nn.Module], home: int) -> None:
    """Sums the gradients of all models, in order, in model number ``home``. The other models have no gradients
    afterwards.

    A parameter without gradient in all models gets none.
    """
    for row in zip(*(model.parameters() for model in models), strict=True):
        own, found = row[home], [parameter.grad for parameter in row if parameter.grad is not None]
        for parameter in row:
            parameter.grad = None
        if found:
            dense_first = sorted(found, key=lambda gradient: gradient.is_sparse)
            terms = (widened(async_copy.move_tensor(grad, own.device)) for grad in dense_first)
            own.grad = reduce(_sum, terms).to(own.dtype)


def _sum(total: Tensor, gradient: Tensor) -> Tensor:
    return total + gradient if total.is_sparse else total.add_(gradient)
