"""Cutting a micro-batch that was collated as a whole, and joining outputs.

Ranks collate their own samples. Within a process the batch is there already, and only its form tells what belongs to
which sample. What a form does not tell is refused and not guessed: a sum over the batch in a 0-dimensional tensor, say,
would be counted once for each part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from evener.core.types import Tree
from evener.data.batch import MicroBatch, map_leaves
from evener.errors import TaskError


class UncutError(TaskError):
    """Inputs or targets that cannot be cut."""


class UnjoinableError(Exception):
    """Outputs that do not have the samples along dimension 0."""


def cut(micro: MicroBatch, counts: Sequence[int]) -> list[MicroBatch]:
    """Consecutive parts of ``micro`` of so many samples, of which none is 0. They share its memory.

    Raises:
        UncutError: If a part of inputs or targets cannot be cut; names it.
    """
    check_rows(micro)
    return [micro.rows(start, stop) for start, stop in pairwise([0, *accumulate(counts)])]


def check_rows(micro: MicroBatch) -> None:
    """Raises:
    UncutError: If not every tensor of inputs and targets has the samples along dimension 0.
    """
    n = len(micro.samples)
    trees = {"inputs": micro.inputs, "targets": micro.targets}
    for where, what in (found for name, tree in trees.items() for found in _uncut(tree, n, name)):
        raise UncutError(
            f"{where} is {what}, which does not tell what of it belongs to which of the {n} samples of a batch; "
            "devices of one process take rows of tensors that have the samples along dimension 0. Have the task's "
            "collate function make such tensors, or use 'ddp', where each process collates its own samples"
        )


def _uncut(tree: Tree, n: int, where: str) -> Iterator[tuple[str, str]]:
    """What cannot be cut, and where it stands."""
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
        if tree and not any(isinstance(leaf, Tensor) for leaf in leaves(tree)):
            yield from [(where, f"a {type(tree).__name__} without tensors")] if any(tree) else []
            return
        for place, value in enumerate(tree):
            yield from _uncut(value, n, f"{where}[{place}]")
    elif dataclasses.is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from _uncut(getattr(tree, field.name), n, f"{where}.{field.name}")
    elif not (tree is None or isinstance(tree, str | bool)):
        yield where, f"of type {type(tree).__name__}"


def is_ambiguous(micro: MicroBatch) -> bool:
    """Whether a sequence in it has as many entries as there are samples: it may be one tensor for each of them."""
    return _is_ambiguous((micro.inputs, micro.targets), len(micro.samples), top=True)


def _is_ambiguous(tree: Tree, n: int, top: bool = False) -> bool:
    if isinstance(tree, tuple | list):
        return (len(tree) == n and not top) or any(_is_ambiguous(value, n) for value in tree)
    if isinstance(tree, Mapping):
        return any(_is_ambiguous(value, n) for value in tree.values())
    if dataclasses.is_dataclass(tree):
        return any(_is_ambiguous(getattr(tree, field.name), n) for field in dataclasses.fields(tree))
    return False


def leaves(tree: Tree) -> list[Any]:
    """What is no tuple, list, mapping or dataclass in it, in order."""
    found: list[Any] = []

    def noted(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(noted, tree)
    return found


def join(outputs: Sequence[Tree], counts: Sequence[int], device: torch.device) -> Tree:
    """One tree of what the parts of a micro-batch, of so many samples, came to: their rows one after the other.

    Raises:
        UnjoinableError: If they are no such rows.
    """
    columns = [leaves(tree) for tree in outputs]
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
    """``n`` samples for ``parts``: two of them take some, not as many as each other, the others none.

    Raises:
        UnjoinableError: If there are too few.
    """
    if n < 3:
        raise UnjoinableError
    first = n // 2 + 1
    return [first, n - first, *[0] * (parts - 2)]
