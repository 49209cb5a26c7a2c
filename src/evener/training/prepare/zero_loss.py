"""A loss of zero, for a rank that has no terms but must run the backward pass.

BatchNorm on other ranks waits in the backward pass for this rank's part, and code that reads gradients must get zeros.
Multiplying the loss by zero is not enough: zero times a loss or a derivative that is not finite is not zero. So each
node of the backward graph that receives only zeros returns only zeros. This excludes custom autograd functions, such as
a BatchNorm over all ranks, whose part of the other ranks' gradients is not zero::

    silent ── 0 ──▶ loss ── 0 ──▶ log ── 0 * inf, made 0 ──▶ layers ── 0 ──▶ BatchNorm ──▶ layers, parameters, inputs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction


def silent(total: Tensor) -> Tensor:
    """Returns zero. Its backward pass sends zeros through the graph behind ``total``, if there is one."""
    if not total.requires_grad:
        return total.detach().new_zeros(())
    for node in _nodes_behind(total):
        if not isinstance(node, BackwardCFunction):
            node.register_hook(_zeros_of_zeros)
    return silence_of([total])


def silence_of(outputs: Sequence[Tensor]) -> Tensor:
    """Returns zero, with zeros as the gradients for ``outputs``."""
    made: Tensor = _Silent.apply(*outputs)  # type: ignore[no-untyped-call]
    return made


def _nodes_behind(total: Tensor) -> Iterator[Any]:
    """Yields the nodes of the backward graph, without those that accumulate the gradient of a leaf."""
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
    """Node hook that returns zeros if only zeros came in. Returns None, no change, if another loss came in too."""
    if any(each is not None and bool(each.any()) for each in came):
        return None
    return tuple(None if each is None else torch.zeros_like(each) for each in gradients)


class _Silent(torch.autograd.Function):
    """Zero, with gradients of zero."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.save_for_backward(*outputs)
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(torch.zeros_like(output) for output in ctx.saved_tensors)
