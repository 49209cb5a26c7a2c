"""Backward in two parts, of a stage's inputs and of its weights: ``torch.distributed.pipelining._backward``.

Zero-bubble schedules need them. The public way to them is a whole schedule's runtime, which wants micro-batches of one
shape; which part of a graph leads to inputs and which to weights alone is found there and nowhere else. It is imported
with the first backward: the package imports torch's compiler, for a second.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


@cache
def _theirs() -> Any:
    return importlib.import_module("torch.distributed.pipelining._backward")


def backward_of_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    weights: Sequence[nn.Parameter],
) -> list[dict[str, Any]]:
    """Adds to the gradients of ``inputs``; returns what :func:`backward_of_weights` needs.

    Without inputs that could have one there is nothing to hurry for, and the whole of backward is left to that.
    """
    if not inputs or not outputs:
        return [{"outputs": list(outputs), "gradients": gradients}]
    given = None if gradients is None else list(gradients)
    _, groups = _theirs().stage_backward_input(list(outputs), given, list(inputs), iter(weights))
    return list(groups)


def backward_of_weights(groups: list[dict[str, Any]], weights: Sequence[nn.Parameter]) -> None:
    """Adds to the gradients of ``weights``."""
    if groups and "outputs" in groups[0]:
        if groups[0]["outputs"]:
            torch.autograd.backward(groups[0]["outputs"], groups[0]["gradients"])
        return
    _theirs().stage_backward_weight(iter(weights), groups)
