"""The gradients of a DDP module, as its reducer sums them, and the payload of collectives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from evener.torch_internals.ddp import logged

_KNOWN = {
    "all_reduce": (0, "tensor"),
    "all_reduce_coalesced": (0, "tensors"),
    "broadcast": (0, "tensor"),
    "reduce": (0, "tensor"),
    "gather": (0, "tensor"),
    "scatter": (0, "tensor"),
    "all_gather": (1, "tensor"),
    "all_gather_into_tensor": (1, "input_tensor"),
    "all_gather_single": (1, "input_tensor"),
    "all_gather_coalesced": (1, "input_tensor_list"),
    "reduce_scatter": (1, "input_list"),
    "reduce_scatter_tensor": (1, "input"),
    "reduce_scatter_single": (1, "input"),
    "all_to_all": (1, "input_tensor_list"),
    "all_to_all_single": (1, "input"),
    "barrier": (3, "-"),
}
PAYLOADS = {name: payload for name, payload in _KNOWN.items() if hasattr(distributed_c10d, name)}
"""The collectives of this torch, each with the position and name of the argument that a rank sends."""


class GradientExchange:
    """Follows the gradients of a DDP module, and counts the all-reduces of its reducer from DDP's logging data.

    Args:
        model: The DDP module.
        found: Called with the bytes of each all-reduce of a backward pass, at its first gradient.
    """

    def __init__(self, model: Any, found: Callable[[list[int]], None]) -> None:
        self._model = weakref.ref(model)
        self._found = found
        self.is_begun = self.syncs = False
        """Whether a backward pass of the module is due, and whether its gradients are summed over the ranks."""
        self.number = self.usual = 0
        """Gradients of this backward pass so far, and those of the one before."""
        self._known: list[int] | None = None

    def end_forward(self) -> None:
        """Called at the end of a forward pass."""
        model = self._model()
        self.is_begun = torch.is_grad_enabled()
        self.syncs = self.is_begun and model is not None and bool(model.require_backward_grad_sync)

    def begin_backward(self) -> None:
        """Called at the first gradient of a backward pass."""
        self.is_begun = False
        self.usual, self.number = self.number, 0
        model = self._model()
        if self.syncs and model is not None:
            self._found(self._known or self._buckets(model))

    def _buckets(self, model: Any) -> list[int]:
        """Returns the bytes of each all-reduce. They are final once DDP has rebuilt its buckets."""
        data = logged(model)
        rebuilt = data.get("rebuilt_bucket_sizes")
        sizes = [int(size) for size in (rebuilt or data["bucket_sizes"]).split(",")]
        sizes += [0] * int(data.get("find_unused_parameters", 0))  # the map of unused parameters
        self._known = sizes if rebuilt else None
        return sizes


def samples_of(tree: Any) -> int:
    """Returns the size of the first dimension of the first tensor that has one; 0 if there is none."""
    if isinstance(tree, Tensor):
        return tree.shape[0] if tree.dim() else 0
    if not isinstance(tree, list | tuple):
        if not isinstance(tree, Mapping):
            return 0
        tree = tree.values()
    for each in tree:
        if found := samples_of(each):
            return found
    return 0


def nbytes_of(payload: Any) -> int:
    """Returns the bytes of all tensors."""
    return sum(leaf.numel() * leaf.element_size() for leaf in _leaves(payload))


def _leaves(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)
