"""Cuts a collated micro-batch into parts, and joins the outputs of the parts.

Ranks collate their own samples, but the devices of one process get a batch that is already collated. Only tensors with
the samples along dimension 0 show which values belong to which sample. Everything else is refused: for example, a
0-dimensional tensor with a sum over the batch would be counted once for each part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from evener.core.types import Tree
from evener.data.batch import MicroBatch, leaves_of, map_leaves
from evener.errors import TaskError


class UncutError(TaskError):
    """Raised if inputs or targets cannot be cut."""


class UnjoinableError(Exception):
    """Raised if outputs do not have the samples along dimension 0."""


def cut(micro: MicroBatch, counts: Sequence[int]) -> list[MicroBatch]:
    """Cuts ``micro`` into consecutive parts with ``counts`` samples each, none of them 0. The parts share its memory.

    Raises:
        UncutError: If inputs or targets cannot be cut. The error names the value at fault.
    """
    check_rows(micro)
    return [micro.rows(start, stop) for start, stop in pairwise([0, *accumulate(counts)])]


def check_rows(micro: MicroBatch) -> None:
    """Raises UncutError if a tensor of inputs or targets does not have the samples along dimension 0."""
    n = len(micro.samples)
    trees = {"inputs": micro.inputs, "targets": micro.targets}
    for where, what in (found for name, tree in trees.items() for found in _uncut(tree, n, name)):
        raise UncutError(
            f"{where} is {what}, which does not tell what of it belongs to which of the {n} samples of a batch; "
            "devices of one process take rows of tensors that have the samples along dimension 0. Have the task's "
            "collate function make such tensors, or use 'ddp', where each process collates its own samples"
        )


def _uncut(tree: Tree, n: int, where: str) -> Iterator[tuple[str, str]]:
    """Yields the values that cannot be cut: where each is in the tree, and a description."""
    if isinstance(tree, Tensor):
        if tree.layout is not torch.strided or tree.dim() == 0 or len(tree) != n:
            kind = "" if tree.layout is torch.strided else "sparse "
            yield where, f"a {kind}tensor of shape {tuple(tree.shape)}"
    elif hasattr(tree, "to"):
        yield where, f"a {type(tree).__name__}"
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _uncut(value, n, f"{where}[{key!r}]")
    elif isinstance(tree, tuple | list):
        found = list(leaves_of(tree))
        if not any(isinstance(leaf, Tensor) for leaf in found):
            known = [leaf for leaf in found if leaf is not None]
            yield from [(where, f"a {type(tree).__name__} without tensors")] if known else []
            return
        for place, value in enumerate(tree):
            yield from _uncut(value, n, f"{where}[{place}]")
    elif dataclasses.is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from _uncut(getattr(tree, field.name), n, f"{where}.{field.name}")
    elif not (tree is None or isinstance(tree, str | bool)):
        yield where, f"of type {type(tree).__name__}"


def is_ambiguous(micro: MicroBatch) -> bool:
    """Returns True if a sequence in it has as many entries as there are samples. It might hold one tensor for each
    sample."""
    return _is_ambiguous((micro.inputs, micro.targets), len(micro.samples), top=True)


def _is_ambiguous(tree: Tree, n: int, top: bool = False) -> bool:
    if isinstance(tree, tuple | list):
        return (len(tree) == n and not top) or any(_is_ambiguous(value, n) for value in tree)
    if isinstance(tree, Mapping):
        return any(_is_ambiguous(value, n) for value in tree.values())
    if dataclasses.is_dataclass(tree):
        return any(_is_ambiguous(getattr(tree, field.name), n) for field in dataclasses.fields(tree))
    return False


def join(outputs: Sequence[Tree], counts: Sequence[int], device: torch.device) -> Tree:
    """Joins the outputs of the parts of a micro-batch, row after row. The parts have ``counts`` samples.

    Raises:
        UnjoinableError: If the outputs do not have a row for each sample.
    """
    columns = [leaves_of(tree) for tree in outputs]
    if len({len(column) for column in columns}) > 1:
        raise UnjoinableError
    joined = iter([_joined(row, counts, device) for row in zip(*columns, strict=True)])
    return map_leaves(lambda _: next(joined), outputs[0])


def _joined(row: Sequence[Any], counts: Sequence[int], device: torch.device) -> Any:
    if all(leaf is None for leaf in row):
        return None
    fitting = (
        isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == n
        for leaf, n in zip(row, counts, strict=True)
    )
    if not all(fitting):
        raise UnjoinableError
    return torch.cat([leaf.to(device) for leaf in row])


def different(n: int, parts: int) -> list[int]:
    """Divides ``n`` samples over two of ``parts`` in unequal numbers. The other parts get none.

    Raises:
        UnjoinableError: If there are fewer than 3 samples.
    """
    if n < 3:
        raise UnjoinableError
    first = n // 2 + 1
    return [first, n - first, *[0] * (parts - 2)]
