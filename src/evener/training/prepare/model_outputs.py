"""What models give while a batch is at hand, where ranks wait for each other in going backward through them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evener.data.batch import map_leaves


class Outputs:
    """Those of one preparation.

    Args:
        are_wanted: Whether a batch is at hand.
    """

    def __init__(self, are_wanted: Callable[[], bool]) -> None:
        self.found: list[Tensor] = []
        self._are_wanted = are_wanted
        self._hooks: list[RemovableHandle] = []

    def watch(self, models: Sequence[nn.Module]) -> None:
        """Keeps what these models give from here on, and no others."""
        while self._hooks:
            self._hooks.pop().remove()
        self._hooks = [model.register_forward_hook(_Hook(self)) for model in models]

    def keep(self, given: Any) -> None:
        """A model has given this."""
        if self._are_wanted():
            map_leaves(self._keep, given)

    def _keep(self, leaf: Any) -> None:
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            self.found.append(leaf)


class _Hook:
    """Of a model; in a copy of the model, or in a file, it does nothing."""

    def __init__(self, outputs: Outputs | None = None) -> None:
        self._outputs = None if outputs is None else weakref.ref(outputs)

    def __call__(self, module: nn.Module, args: Any, found: Any) -> None:
        outputs = None if self._outputs is None else self._outputs()
        if outputs is not None:
            outputs.keep(found)

    def __reduce__(self) -> Any:
        return _Hook, ()
