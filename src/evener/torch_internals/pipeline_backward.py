"""Backward in two parts, of a stage's inputs and of its weights: ``torch.distributed.pipelining._backward``.

Zero-bubble schedules need them. The public way to them is a whole schedule's runtime, which wants micro-batches of one
shape; which part of a graph leads to inputs and which to weights alone is found there and nowhere else. It is imported
with the first backward: the package imports torch's compiler, for a second.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


@cache
def _theirs() -> Any:
    return importlib.import_module("torch.distributed.pipelining._backward")


class _TangledError(Exception):
    """The gradients of a weight meet those of inputs in several places."""


def _apart(groups: Callable[..., Any]) -> Callable[..., Any]:
    """Their grouping of weights by where their gradients meet those of inputs, if that is one place for each group."""

    def checked(*args: Any) -> Any:
        found = groups(*args)
        if any(len(group["intermediates"]) > 1 for group in found):
            raise _TangledError
        return found

    return checked


def backward_of_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    weights: Sequence[nn.Parameter],
) -> list[dict[str, Any]]:
    """Adds to the gradients of ``inputs``; returns what :func:`backward_of_weights` needs.

    Without inputs that could have one there is nothing to hurry for, and the whole of backward is left to that. Where a
    weight is used in several places, such as a bias of positions that several blocks add, PyTorch's second part takes
    a way twice, and either fails or gives wrong gradients: then it is the whole of backward again.
    """
    whole = {"outputs": list(outputs), "gradients": None if gradients is None else list(gradients)}
    if not inputs or not outputs:
        return [whole]
    theirs = _theirs()
    try:
        with mock.patch.object(theirs, "get_param_groups", _apart(theirs.get_param_groups)):
            _, groups = theirs.stage_backward_input(
                list(outputs), whole["gradients"], list(inputs), iter(weights)
            )
        return list(groups)
    except _TangledError:
        torch.autograd.backward(outputs, gradients, retain_graph=True, inputs=list(inputs))
        return [whole]


def backward_of_weights(groups: list[dict[str, Any]], weights: Sequence[nn.Parameter]) -> None:
    """Adds to the gradients of ``weights``.

    A first gradient is copied: where weights are only added, that of one is that of another, and of the stage's input,
    in the same memory, to which the next micro-batch's would be added.
    """
    if groups and "outputs" in groups[0]:
        if groups[0]["outputs"]:
            torch.autograd.backward(groups[0]["outputs"], groups[0]["gradients"], inputs=list(weights))
        return
    without = [weight for weight in weights if weight.grad is None]
    _theirs().stage_backward_weight(iter(weights), groups)
    for weight in without:
        if weight.grad is not None:
            weight.grad = weight.grad.clone()
