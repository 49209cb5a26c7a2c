"""Compares the outputs of a model that were computed in two ways."""

from __future__ import annotations

import torch
from torch import Tensor

from evener.core.types import Tree
from evener.data.batch import named_leaves


def difference(whole: Tree, joined: Tree, computed: torch.dtype, of_whole: str, of_pieces: str) -> str:
    """Describes in words how outputs differ; empty if they do not. The last arguments tell what each was computed
    from."""
    pairs = zip(named_leaves(whole, "outputs"), named_leaves(joined, "outputs"), strict=False)
    for (name, one), (_, other) in pairs:
        if type(one) is not type(other):
            kinds = type(one).__name__, type(other).__name__
            return f"{name} is of type {kinds[0]} from {of_whole}, {kinds[1]} from {of_pieces}"
        if isinstance(one, Tensor) and one.shape != other.shape:
            shapes = tuple(one.shape), tuple(other.shape)
            return f"{name} is of shape {shapes[0]} from {of_whole}, {shapes[1]} from {of_pieces}"
        if isinstance(one, Tensor) and not alike(one, other, computed):
            return f"{name} differs by {float((one.double() - other.double()).abs().max()):.2g}"
    return ""


def alike(one: Tensor, other: Tensor, computed: torch.dtype = torch.float32) -> bool:
    """Returns True if two tensors are equal but for rounding. ``computed`` is the dtype of the computation, which may
    be coarser than that of the tensors."""
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    size = float(one.abs().nan_to_num(posinf=0.0).max())
    return torch.allclose(one, other, rtol=0.0, atol=_bound(one, computed) * size, equal_nan=True)


def _bound(x: Tensor, computed: torch.dtype) -> float:
    """Returns the largest relative difference that counts as rounding. It is wider on devices other than the CPU, whose
    products may have lower precision."""
    if x.dtype == torch.float64:
        return 1e-8
    exact = x.dtype == computed == torch.float32 and x.device.type == "cpu"
    return 1e-3 if exact else 0.05
