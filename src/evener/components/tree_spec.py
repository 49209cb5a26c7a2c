"""Splits a tree of tensors, sent between pipeline stages, into a description that is sent once and the tensors.

The tree's form, the shapes and the values that are no tensors follow from the shapes of the model's inputs, which both
ranks know. So a rank sends the description only the first time that inputs of these shapes occur. From then on, the
receiver's host needs to wait for no description.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from evener.data.batch import map_leaves


class TensorSlot:
    """A placeholder for a tensor in a tree, with its shape and type."""

    def __init__(self, tensor: Tensor, number: int) -> None:
        self.number = number
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.trained = tensor.requires_grad
        """True if a gradient is sent back."""

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def room(self, device: torch.device) -> Tensor:
        """Returns an uninitialized tensor of this shape and type."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorSlot) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.number)

    def __repr__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{kind} {self.shape}{', with a gradient' if self.trained else ''}"

    def to(self, *_: object) -> TensorSlot:
        """Returns the slot itself. An object with a ``to`` method is a leaf of trees."""
        return self


def taken_apart(tree: Any) -> tuple[Any, list[Tensor]]:
    """Returns the tree with a slot in place of each tensor, and the tensors."""
    tensors: list[Tensor] = []

    def take_tensor(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return TensorSlot(leaf, len(tensors) - 1)

    return map_leaves(take_tensor, tree), tensors


def holes_in(form: Any) -> list[TensorSlot]:
    """Returns the slots of a tree, in order."""
    found: list[TensorSlot] = []

    def note_slot(leaf: Any) -> Any:
        if isinstance(leaf, TensorSlot):
            found.append(leaf)
        return leaf

    map_leaves(note_slot, form)
    return found


def put_together(form: Any, tensors: list[Tensor]) -> Any:
    """Returns the tree with tensors in place of its slots."""
    return map_leaves(lambda leaf: tensors[leaf.number] if isinstance(leaf, TensorSlot) else leaf, form)


def signature(tree: Any) -> str | None:
    """Returns a text that is equal for trees of equal form and shapes. Returns None if the tree has leaves that are not
    described by it, such as strings or graphs."""
    opaque: list[Any] = []

    def described(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return TensorSlot(leaf, 0)
        if leaf is not None and not isinstance(leaf, bool | int | float):
            opaque.append(leaf)
        return leaf

    described_tree = map_leaves(described, tree)
    return None if opaque else repr(described_tree)
