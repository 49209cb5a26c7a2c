"""Nothing, as a loss: for a rank that has no term of it, and must go backward all the same.

BatchNorm of the other ranks waits in the backward pass for its part. Zero times the loss would not do: zero times a
loss or a derivative that is not finite is not zero. So the outputs that the loss came from get zeros themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evener.prepared.place import Place


def silent(total: Tensor, place: Place) -> Tensor:
    """Zero, with a graph through the model's outputs behind ``total`` if there is one."""
    if not total.requires_grad:
        return total.detach().new_zeros(())
    found = _behind(total, place.outputs)
    return silence_of(found) if found else torch.zeros_like(total).requires_grad_()


def silence_of(outputs: Sequence[Tensor]) -> Tensor:
    """Zero, whose gradients for ``outputs`` are zeros."""
    made: Tensor = _Silent.apply(*outputs)  # type: ignore[no-untyped-call]
    return made


def _behind(total: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Those of ``outputs`` that ``total`` was computed from."""
    nodes: dict[Any, Tensor] = {output.grad_fn: output for output in outputs}
    found, seen = list[Tensor](), set[Any]()
    open_nodes: list[Any] = [total.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in nodes:
            found.append(nodes[node])
        else:
            open_nodes.extend(each for each, _ in node.next_functions)
    return found


class _Silent(torch.autograd.Function):
    """Zero, whose gradients are zeros."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.save_for_backward(*outputs)
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(torch.zeros_like(output) for output in ctx.saved_tensors)
