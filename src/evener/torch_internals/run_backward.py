"""The engine of autograd without what Python does before it: ``_engine_run_backward``.

Under a mode for functions ``backward`` is a function like any other, of which the mode is told and then suspended until
it returns; the forward passes that activation checkpointing repeats in it would not be seen. Within the engine a mode
stays.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward


def run_backward(
    around: AbstractContextManager[Any],
    tensors: Tensor | Sequence[Tensor],
    gradients: Tensor | Sequence[Tensor | None] | None,
    retain_graph: bool | None,
    create_graph: bool,
    inputs: Tensor | Sequence[Tensor] | None,
) -> None:
    """``torch.autograd.backward`` with ``around`` entered while the engine runs."""
    retain = create_graph if retain_graph is None else retain_graph
    into = () if inputs is None else _several(inputs)
    with around:
        _engine_run_backward(
            *_started(tensors, gradients),
            retain,
            create_graph,
            into,
            allow_unreachable=True,
            accumulate_grad=True,
        )


def run_grad(
    around: AbstractContextManager[Any],
    outputs: Tensor | Sequence[Any],
    inputs: Tensor | Sequence[Any],
    gradients: Tensor | Sequence[Tensor | None] | None,
    retain_graph: bool | None,
    create_graph: bool,
    allow_unused: bool,
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` of tensors or edges, likewise."""
    retain = create_graph if retain_graph is None else retain_graph
    into = _several(inputs)
    with around:
        found: tuple[Tensor | None, ...] = _engine_run_backward(
            *_started(outputs, gradients), retain, create_graph, into, allow_unused, accumulate_grad=False
        )
    return found


def _started(
    tensors: Tensor | Sequence[Any], gradients: Tensor | Sequence[Tensor | None] | None
) -> tuple[tuple[Any, ...], tuple[Tensor | None, ...]]:
    """Where backward begins, and with which gradients: 1 for a number that has none."""
    roots = _several(tensors)
    given = (None,) * len(roots) if gradients is None else _several(gradients)
    started = (
        torch.ones_like(root)
        if gradient is None and isinstance(root, Tensor) and root.numel() == 1
        else gradient
        for root, gradient in zip(roots, given, strict=True)
    )
    return roots, tuple(started)


def _several(tensors: Any) -> tuple[Any, ...]:
    return (tensors,) if isinstance(tensors, Tensor | GradientEdge) else tuple(tensors)
