"""Cuts a micro-batch into pieces, as for a pipeline, and joins their outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from evener.components.tree_spec import put_together, taken_apart
from evener.data.batch import MicroBatch, has_to, leaves_of, map_leaves, parts_of


def pieces_of(micro: MicroBatch, wanted: int) -> list[MicroBatch]:
    """Cuts ``micro`` into ``wanted`` pieces of nearly equal size, with at least one sample each.

    Anything that is no tensor with the samples along dimension 0, such as a graph, cannot be cut and stays one piece.
    """
    samples = len(micro.samples)
    count = min(wanted, samples) if can_be_cut(micro) else 1
    if count < 2:
        return [micro]
    cuts = [samples * index // count for index in range(count + 1)]
    return [micro.rows(start, stop) for start, stop in pairwise(cuts)]


def can_be_cut(micro: MicroBatch) -> bool:
    """Returns True if it has samples that count, and every tensor has a row for each sample."""
    return bool(micro.weight) and by_samples((micro.inputs, micro.targets), len(micro.samples))


def first_piece(micro: MicroBatch, most: int) -> tuple[MicroBatch, MicroBatch | None]:
    """Cuts off the first piece, where pieces are as few as possible, nearly equal, and have at most ``most`` samples.
    Returns the piece and the rest; the rest is None if nothing is left."""
    samples = len(micro.samples)
    size = math.ceil(samples / math.ceil(samples / most))
    return (micro, None) if size == samples else (micro.rows(0, size), micro.rows(size, samples))


def by_samples(tree: Any, samples: int) -> bool:
    """Returns True if every tensor of ``tree`` has ``samples`` rows and everything else is a plain value that belongs
    to all of them."""
    fits = [not has_values_of_samples(tree, samples)]

    def check_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            fits.append(leaf.ndim > 0 and len(leaf) == samples)
        else:
            fits.append(leaf is None or isinstance(leaf, bool | int | float | str))
        return leaf

    map_leaves(check_leaf, tree)
    return all(fits)


def has_values_of_samples(tree: Any, samples: int) -> bool:
    """Returns True if ``tree`` has plain values that may belong to single samples, such as lengths or names: in a list,
    or in a tuple of ``samples`` entries. Rows of tensors that are taken would have those of other samples beside them.
    """
    if isinstance(tree, Tensor) or has_to(tree):
        return False
    if isinstance(tree, tuple | list):
        known = [leaf for leaf in leaves_of(tree) if leaf is not None]
        if known and not any(isinstance(leaf, Tensor) for leaf in known):
            return isinstance(tree, list) or len(tree) == samples
    return any(has_values_of_samples(part, samples) for part in parts_of(tree))


def joined(trees: Sequence[Any]) -> Any:
    """Concatenates the tensors of trees of the same form, row by row. Returns a tree of that form."""
    form, _ = taken_apart(trees[0])
    columns = zip(*(taken_apart(tree)[1] for tree in trees), strict=True)
    return put_together(form, [torch.cat(column) for column in columns])
