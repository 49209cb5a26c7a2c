"""Selects the tensors of a sample that are sequences, and cuts a rank's piece out of them.

By default these are all tensors that have a dimension for positions; they must then have the same length there. The
shape cannot tell a tensor that has such a dimension but is no sequence. If lengths differ, the user names the
sequences::

    inputs              the tensor itself                 inputs.1          the second of a tuple or list
    targets.words       the entry of a dict, or the field of a dataclass
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from evener.data.batch import MicroBatch, map_named, named_leaves
from evener.errors import ConfigurationError, TaskError

Named = dict[str, Tensor]


class Cutting:
    """Cuts the tensors of a micro-batch.

    Args:
        dim: Dimension of the positions.
        names: Names of the tensors that are sequences. None means all that have the dimension ``dim``.
    """

    def __init__(self, dim: int, names: frozenset[str] | None) -> None:
        self.dim, self._names = dim, names

    def length(self, micro: MicroBatch) -> int:
        """Returns the number of positions of the sequences in the micro-batch.

        Raises:
            TaskError: If there are no sequences, or they have several lengths.
            ConfigurationError: If one of the names is not a sequence of the inputs.
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
        """Returns ``tree`` with ``take`` applied to each sequence. The results are made contiguous, as the whole is,
        because models call ``x.view(-1)``."""
        return map_named(
            lambda found, leaf: take(leaf).contiguous() if self.is_sequence(found, leaf) else leaf, tree, name
        )

    def is_sequence(self, name: str, leaf: Any) -> bool:
        """Returns True if a leaf is to be cut."""
        if not isinstance(leaf, Tensor):
            _check_opaque(name, leaf)
            return False
        return leaf.dim() > self.dim and (self._names is None or name in self._names)

    def _sequences(self, tree: Any, name: str) -> Named:
        return {found: leaf for found, leaf in named_leaves(tree, name) if self.is_sequence(found, leaf)}

    def _check_names(self, micro: MicroBatch, found: Named) -> None:
        missing = sorted((self._names or frozenset()) - set(found))
        # Only inputs are checked: in evaluation and prediction targets stay whole, and may be of another kind.
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
