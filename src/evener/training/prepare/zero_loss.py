"""Nothing, as a loss: for a rank that has no term of it, and must go backward all the same.

BatchNorm of the other ranks waits in the backward pass for its part, and whoever asks for a gradient gets one: zeros.
Zero times the loss would not do: zero times a loss or a derivative that is not finite is not zero. So each step of the
backward pass that gets zeros alone is made to give zeros alone; not a function of somebody's own, as a BatchNorm of all
ranks, whose part of the other ranks' gradients is not zero::

    silent ── 0 ──▶ loss ── 0 ──▶ log ── 0 * inf, made 0 ──▶ layers ── 0 ──▶ BatchNorm ──▶ layers, parameters, inputs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction


def silent(total: Tensor) -> Tensor:
    """Zero, with the graph behind ``total`` if there is one, which brings zeros."""
    if not total.requires_grad:
        return total.detach().new_zeros(())
    for node in _nodes_behind(total):
        if not isinstance(node, BackwardCFunction):
            node.register_hook(_zeros_of_zeros)
    return silence_of([total])


def silence_of(outputs: Sequence[Tensor]) -> Tensor:
    """Zero, whose gradients for ``outputs`` are zeros."""
    made: Tensor = _Silent.apply(*outputs)  # type: ignore[no-untyped-call]
    return made


def _nodes_behind(total: Tensor) -> Iterator[Any]:
    """The steps of the backward pass, without those that only keep the gradient of a leaf."""
    seen = set[Any]()
    open_nodes: list[Any] = [total.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.next_functions:
            yield node
            open_nodes.extend(each for each, _ in node.next_functions)


def _zeros_of_zeros(gradients: Sequence[Any], came: Sequence[Any]) -> tuple[Any, ...] | None:
    """What a step gives, if another loss has not come to it, too."""
    if any(each is not None and bool(each.any()) for each in came):
        return None
    return tuple(None if each is None else torch.zeros_like(each) for each in gradients)


class _Silent(torch.autograd.Function):
    """Zero, whose gradients are zeros."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.save_for_backward(*outputs)
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(torch.zeros_like(output) for output in ctx.saved_tensors)
