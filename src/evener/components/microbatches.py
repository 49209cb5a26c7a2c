"""A micro-batch cut into pieces that fill a pipeline, and what they come to put together again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from evener.components.tree_spec import put_together, taken_apart
from evener.data.batch import MicroBatch, map_leaves


def pieces_of(micro: MicroBatch, wanted: int) -> list[MicroBatch]:
    """``micro`` cut into as many as are wanted, of nearly equal size and with a sample each at least.

    What is no tensor with the samples along dimension 0, a graph say, cannot be cut, and stays one.
    """
    samples = len(micro.samples)
    count = min(wanted, samples) if can_be_cut(micro) else 1
    if count < 2:
        return [micro]
    cuts = [samples * index // count for index in range(count + 1)]
    return [micro.rows(start, stop) for start, stop in pairwise(cuts)]


def can_be_cut(micro: MicroBatch) -> bool:
    """Whether it has samples that count, and every tensor a row for each."""
    return bool(micro.weight) and by_samples((micro.inputs, micro.targets), len(micro.samples))


def first_piece(micro: MicroBatch, most: int) -> tuple[MicroBatch, MicroBatch | None]:
    """The first of as few and nearly equal pieces as have at most so many samples, and what is left; None for none."""
    samples = len(micro.samples)
    size = math.ceil(samples / math.ceil(samples / most))
    return (micro, None) if size == samples else (micro.rows(0, size), micro.rows(size, samples))


def by_samples(tree: Any, samples: int) -> bool:
    """Whether every tensor of ``tree`` has as many rows as there are samples."""
    fits: list[bool] = []

    def look(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            fits.append(leaf.ndim > 0 and len(leaf) == samples)
        else:
            fits.append(leaf is None or isinstance(leaf, bool | int | float | str))
        return leaf

    map_leaves(look, tree)
    return all(fits)


def detached(leaf: Any) -> Any:
    """A tensor without its graph, anything else as it is."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def joined(trees: Sequence[Any]) -> Any:
    """The rows of all of them one below the other, in a tree of their form."""
    form, _ = taken_apart(trees[0])
    columns = zip(*(taken_apart(tree)[1] for tree in trees), strict=True)
    return put_together(form, [torch.cat(column) for column in columns])
