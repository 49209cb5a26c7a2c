"""Which tensors of a sample are sequences, and what of them a rank gets.

By default all that have a dimension for positions: they must then be of one length. A tensor that has one but is no
sequence cannot be told by its shape, so where lengths differ the user names those that are::

    inputs              the tensor itself                 inputs.1          the second of a tuple or list
    targets.words       the entry of a dict, or the field of a dataclass
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from evener.data.batch import MicroBatch, map_leaves
from evener.errors import ConfigurationError, TaskError

Named = dict[str, Tensor]


def named_leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What :func:`~evener.data.batch.map_leaves` goes through, in its order, each with its name."""
    if isinstance(tree, Tensor) or hasattr(tree, "to"):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_leaves(value, f"{name}.{key}")
    elif isinstance(tree, tuple | list):
        for place, value in enumerate(tree):
            yield from named_leaves(value, f"{name}.{place}")
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            if field.init:
                yield from named_leaves(getattr(tree, field.name), f"{name}.{field.name}")
    else:
        yield name, tree


def map_named(function: Callable[[str, Any], Any], tree: Any, name: str) -> Any:
    """``tree`` with ``function`` applied to the name and value of every leaf."""
    names = (found for found, _ in named_leaves(tree, name))
    return map_leaves(lambda leaf: function(next(names), leaf), tree)


class Cutting:
    """How the tensors of a micro-batch are cut.

    Args:
        dim: The dimension of the positions.
        names: Of the tensors that are sequences; None for all that have such a dimension.
    """

    def __init__(self, dim: int, names: frozenset[str] | None) -> None:
        self.dim, self._names = dim, names

    def length(self, micro: MicroBatch) -> int:
        """How many positions the sequences of the micro-batch have.

        Raises:
            TaskError: If there are none, or they are of several lengths.
            ConfigurationError: If a tensor was named that there is not.
        """
        found = self._sequences(micro.inputs, "inputs")
        everything = found | self._sequences(micro.targets, "targets")
        self._check_names(micro, everything)
        if not found:
            raise TaskError(
                f"strategy 'context' divides sequences along dimension {self.dim}, and no tensor of the inputs has "
                "one; say with the option dim which dimension the positions are, or use strategy 'ddp'"
            )
        lengths = {name: leaf.shape[self.dim] for name, leaf in everything.items()}
        if len(set(lengths.values())) > 1:
            words = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise TaskError(
                f"strategy 'context' divides sequences of one length along dimension {self.dim}, but {words}. Say "
                f'which are sequences, with commas between them, as in cut="{next(iter(lengths))}"'
            )
        return next(iter(lengths.values()))

    def part(self, tree: Any, name: str, take: Callable[[Tensor], Tensor]) -> Any:
        """``tree`` with each sequence replaced by what ``take`` has of it, contiguous as the whole is: models ask
        for ``x.view(-1)``."""
        return map_named(
            lambda found, leaf: take(leaf).contiguous() if self.is_sequence(found, leaf) else leaf, tree, name
        )

    def is_sequence(self, name: str, leaf: Any) -> bool:
        """Whether a leaf is to be cut."""
        if not isinstance(leaf, Tensor):
            _check_opaque(name, leaf)
            return False
        return leaf.dim() > self.dim and (self._names is None or name in self._names)

    def _sequences(self, tree: Any, name: str) -> Named:
        return {found: leaf for found, leaf in named_leaves(tree, name) if self.is_sequence(found, leaf)}

    def _check_names(self, micro: MicroBatch, found: Named) -> None:
        missing = sorted((self._names or frozenset()) - set(found))
        # In evaluation and prediction targets stay whole, and may be of another kind.
        missing = [name for name in missing if name.startswith("inputs")]
        if missing:
            there = ", ".join(name for name, _ in named_leaves(micro.inputs, "inputs"))
            raise ConfigurationError(
                f"strategy 'context': cut names {missing[0]}, which is no tensor with a dimension {self.dim}; the "
                f"inputs are {there}"
            )


def _check_opaque(name: str, leaf: Any) -> None:
    if hasattr(leaf, "to"):
        raise TaskError(
            f"strategy 'context' cannot cut {name}, which is of type {type(leaf).__name__}: let the data set or the "
            "collate function give tensors, or a plain dict of them"
        )
