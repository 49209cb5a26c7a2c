"""Collects the outputs of models during a batch, for ranks that wait for each other in the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evener.data.batch import map_leaves


class Outputs:
    """The model outputs of one preparation.

    Args:
        are_wanted: Returns True within a batch.
    """

    def __init__(self, are_wanted: Callable[[], bool]) -> None:
        self.found: list[Tensor] = []
        self._are_wanted = are_wanted
        self._hooks: list[RemovableHandle] = []

    def watch(self, models: Sequence[nn.Module]) -> None:
        """Collects the outputs of these models from now on, and of no others."""
        while self._hooks:
            self._hooks.pop().remove()
        self._hooks = [model.register_forward_hook(_Hook(self)) for model in models]

    def keep(self, given: Any) -> None:
        """Called with the output of a model."""
        if self._are_wanted():
            map_leaves(self._keep, given)

    def _keep(self, leaf: Any) -> None:
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            self.found.append(leaf)


class _Hook:
    """Forward hook of a model. Does nothing in a copy of the model, or in one loaded from a file."""

    def __init__(self, outputs: Outputs | None = None) -> None:
        self._outputs = None if outputs is None else weakref.ref(outputs)

    def __call__(self, module: nn.Module, args: Any, found: Any) -> None:
        outputs = None if self._outputs is None else self._outputs()
        if outputs is not None:
            outputs.keep(found)

    def __reduce__(self) -> Any:
        return _Hook, ()
