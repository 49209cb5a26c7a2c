"""A loss of zero, for a rank that has no terms but must run the backward pass.

BatchNorm on other ranks waits in the backward pass for this rank's part, and code that reads gradients must get zeros.
Multiplying the loss by zero is not enough: zero times a loss or a derivative that is not finite is not zero. So each
node of the backward graph that receives only zeros returns only zeros. This excludes custom autograd functions, such as
a BatchNorm over all ranks, whose part of the other ranks' gradients is not zero::

    silent ── 0 ──▶ loss ── 0 ──▶ log ── 0 * inf, made 0 ──▶ layers ── 0 ──▶ BatchNorm ──▶ layers, parameters, inputs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from evener.components.reached_parameters import nodes_behind
from evener.hardware.async_read import is_late


def silent(total: Tensor) -> Tensor:
    """Returns zero. Its backward pass sends zeros through the graph behind ``total``, if there is one."""
    if not total.requires_grad:
        return total.detach().new_zeros(())
    for node in nodes_behind(total):
        is_leaf = not node.next_functions
        if not (is_leaf or isinstance(node, BackwardCFunction)):
            node.register_hook(_zeros_of_zeros)
    return silence_of([total])


def silence_of(outputs: Sequence[Tensor]) -> Tensor:
    """Returns zero, with zeros as the gradients for ``outputs``."""
    made: Tensor = _Silent.apply(*outputs)  # type: ignore[no-untyped-call]
    return made


def silent_if_zero(value: Tensor) -> Tensor:
    """Returns ``value``, whose backward pass sends zero on as zero through the numbers that it was computed from.

    For a mean over terms that a device counts: over none it is 0 / 0, and so is its gradient. Only numbers are looked
    at: what has a row for each sample is what it is on one device.
    """
    if value.grad_fn is not None:
        _watch(value.grad_fn)
    return value


def _watch(node: Any) -> None:
    behind = [each for each, _ in node.next_functions]
    if not behind or isinstance(node, BackwardCFunction):
        return

    def hook(gradients: Sequence[Any], came: Sequence[Any]) -> Any:
        for each, gradient in zip(behind, gradients, strict=False):
            if each is not None and gradient is not None and not gradient.dim():
                _watch(each)
        behind.clear()  # a graph may be gone through again
        return (
            _zeros_of_zeros(gradients, came) if all(each is None or not each.dim() for each in came) else None
        )

    node.register_hook(hook)


def _zeros_of_zeros(gradients: Sequence[Any], came: Sequence[Any]) -> tuple[Any, ...] | None:
    """Node hook that returns zeros if only zeros came in. Returns None, no change, if another loss came in too."""
    given = [each for each in came if each is not None]
    if given and is_late(given[0].device):
        nothing = ~torch.stack([each.any() for each in given]).any()
        return tuple(
            each if each is None or each.is_sparse else each.masked_fill(nothing, 0) for each in gradients
        )
    if any(map(bool, (each.any() for each in given))):
        return None
    return tuple(None if each is None else _zeros_like(each) for each in gradients)


def _zeros_like(gradient: Tensor) -> Tensor:
    """Returns zeros, with a graph if one of gradients is wanted: other ranks go through it, and wait for this one."""
    if not gradient.requires_grad:
        return torch.zeros_like(gradient)
    return gradient.masked_fill(gradient.new_ones((), dtype=torch.bool), 0)


class _Silent(torch.autograd.Function):
    """Zero, with gradients of zero."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.save_for_backward(*outputs)
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(torch.zeros_like(output) for output in ctx.saved_tensors)
