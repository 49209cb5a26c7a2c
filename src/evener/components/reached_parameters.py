"""Tells which parameters a backward pass has reached, those without a gradient too.

A node of autograd that returns no gradient for an input still passes the turn on, so that the input's own node runs
with nothing to add. DistributedDataParallel counts such a parameter as ready, and sums zeros for it. Hooks on gradients
do not see it, and hooks on the node do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle


class ReachedParameters:
    """Knows the parameters whose nodes of autograd the last backward pass has reached.

    To watch takes about 1 us for each parameter. Where nobody watches, those with a gradient are taken for the reached.
    """

    def __init__(self) -> None:
        self._found: set[Tensor] = set()
        self._handles: list[RemovableHandle] = []

    @property
    def is_watching(self) -> bool:
        """False if parameters with a gradient are taken for the reached."""
        return bool(self._handles)

    def begin(self) -> None:
        """Forgets what an earlier pass has reached."""
        self._found.clear()

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Watches these parameters, all of which require a gradient, from the next pass on."""
        if not self._handles:
            self._handles = [self._hook(p) for p in parameters]

    def _hook(self, parameter: nn.Parameter) -> RemovableHandle:
        return get_gradient_edge(parameter).node.register_hook(lambda *_: self._found.add(parameter))

    def stop(self) -> None:
        """Watches no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def has(self, parameter: nn.Parameter) -> bool:
        """Returns True if the last pass has reached the parameter."""
        return parameter in self._found if self._handles else parameter.grad is not None


def nodes_behind(total: Tensor) -> Iterator[Any]:
    """Yields each node of the backward graph of ``total`` once."""
    seen, todo = set[Any](), [total.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo.extend(each for each, _ in node.next_functions)
