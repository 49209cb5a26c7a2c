"""Collects the outputs of models during a batch, for ranks that wait for each other in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evener.data.batch import map_leaves
from evener.training.prepare.weak_hook import WeakHook


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
        self._hooks = [model.register_forward_hook(WeakHook(self.keep)) for model in models]

    def keep(self, model: nn.Module, args: Any, found: Any) -> None:
        """Called with the output of a model."""
        if self._are_wanted():
            map_leaves(self._keep, found)

    def _keep(self, leaf: Any) -> None:
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            self.found.append(leaf)
