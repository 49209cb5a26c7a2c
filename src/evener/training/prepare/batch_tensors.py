"""Tensors that a loader has handed out, and the batch that they are of.

A loop may fetch the next batch before it computes with the one before, or keep one. Layers and losses go by the batch
at hand, whose shares may be others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from evener.data.batch import map_leaves
from evener.errors import ConfigurationError
from evener.torch_internals.views import base_of


class Turn(Protocol):
    """A batch that was at hand."""

    @property
    def shares(self) -> tuple[int, ...]:
        """How many samples each rank has of it."""


_TURNS: Any = WeakTensorKeyDictionary()
"""By tensor; an attribute of the tensor would be saved with it."""
_KEPT = (
    "{what} with samples of a batch that is no longer at hand, and the ranks have other shares of the one that is: the "
    "loop fetched it before it computed with the batch before, or kept a batch. Compute with a batch before the next "
    "is fetched (the loader reads ahead itself); give batches that are kept to evener.batch"
)


def marked(tree: Any, turn: Turn) -> Any:
    """``tree``, whose tensors know the batch that they are of."""

    def mark(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            _TURNS[leaf] = turn
        return leaf

    return map_leaves(mark, tree)


def check_at_hand(tree: Any, turns: Sequence[Turn], what: str) -> None:
    """Raises:
    ConfigurationError: For tensors of a batch that the loop has left, if the last of ``turns``, which is the one at
        hand, has other shares; on all ranks alike, as all know the shares of all.
    """
    found: list[Turn] = []
    map_leaves(lambda leaf: found.extend(filter(None, [_turn_of(leaf)])), tree)
    for turn in found:
        if turn not in turns and not (turns and turns[-1].shares == turn.shares):
            raise ConfigurationError(_KEPT.format(what=what))


def _turn_of(leaf: Any) -> Turn | None:
    """Of a tensor that was handed out, or a view of it."""
    if not isinstance(leaf, Tensor):
        return None
    whole = base_of(leaf)
    found: Turn | None = _TURNS.get(leaf)
    return found if found is not None or whole is None else _TURNS.get(whole)
