"""What crosses a cut: a tree of tensors, told once in words and from then on sent as tensors alone.

The tree's form, the shapes, and what is no tensor follow from the shapes of the model's inputs, which both ranks know.
So a rank describes what it sends the first time that inputs of these shapes pass, and the host of a receiver waits for
words no more.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from evener.data.batch import map_leaves


class Hole:
    """The place of a tensor in a tree."""

    def __init__(self, tensor: Tensor, number: int) -> None:
        self.number = number
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.trained = tensor.requires_grad
        """Whether a gradient comes back."""

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def room(self, device: torch.device) -> Tensor:
        """Memory for the tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hole) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.number)

    def __repr__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{kind} {self.shape}{', with a gradient' if self.trained else ''}"

    def to(self, *_: object) -> Hole:
        """Makes it a leaf of trees."""
        return self


def taken_apart(tree: Any) -> tuple[Any, list[Tensor]]:
    """The tree with holes in it, and what was there."""
    tensors: list[Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return Hole(leaf, len(tensors) - 1)

    return map_leaves(take, tree), tensors


def holes_in(form: Any) -> list[Hole]:
    """In order."""
    found: list[Hole] = []

    def look(leaf: Any) -> Any:
        if isinstance(leaf, Hole):
            found.append(leaf)
        return leaf

    map_leaves(look, form)
    return found


def put_together(form: Any, tensors: list[Tensor]) -> Any:
    """The tree with the tensors in its holes."""
    return map_leaves(lambda leaf: tensors[leaf.number] if isinstance(leaf, Hole) else leaf, form)


def signature(tree: Any) -> str | None:
    """Equal for trees of equal form and shapes; None if what is in them tells no shape, as words and graphs do not."""
    opaque: list[Any] = []

    def described(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return Hole(leaf, 0)
        if leaf is not None and not isinstance(leaf, bool | int | float):
            opaque.append(leaf)
        return leaf

    described_tree = map_leaves(described, tree)
    return None if opaque else repr(described_tree)
