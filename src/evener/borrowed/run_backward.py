"""The engine of autograd without what Python does before it: ``_engine_run_backward``.

Under a mode for functions ``backward`` is a function like any other, of which the mode is told and then suspended until
it returns; the forward passes that activation checkpointing repeats in it would not be seen. Within the engine a mode
stays.

Tested with torch 2.11, 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward


def run_backward(
    around: AbstractContextManager[Any],
    tensors: Tensor | Sequence[Tensor],
    gradients: Tensor | Sequence[Tensor | None] | None,
    retain_graph: bool | None,
    create_graph: bool,
    inputs: Tensor | Sequence[Tensor] | None,
) -> None:
    """``torch.autograd.backward`` with ``around`` entered while the engine runs."""
    roots = _several(tensors)
    given = [None] * len(roots) if gradients is None else _several(gradients)
    started = tuple(
        torch.ones_like(root) if gradient is None and root.numel() == 1 else gradient
        for root, gradient in zip(roots, given, strict=True)
    )
    retain = create_graph if retain_graph is None else retain_graph
    into = () if inputs is None else tuple(_several(inputs))
    with around:
        _engine_run_backward(
            tuple(roots), started, retain, create_graph, into, allow_unreachable=True, accumulate_grad=True
        )


def _several(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
