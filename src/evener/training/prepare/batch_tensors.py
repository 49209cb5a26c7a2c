"""Remembers which batch the tensors of a loader belong to.

A loop may fetch the next batch before it computes with the previous one, or keep one. Layers and losses assume the
current batch, whose shares may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from evener.data.batch import map_leaves
from evener.errors import ConfigurationError
from evener.torch_internals.autograd import base_of


class PastBatch(Protocol):
    """A batch that was the current one."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Number of samples of each rank."""


_BATCH_OF: Any = WeakTensorKeyDictionary()
"""Maps a tensor to its batch. An attribute of the tensor would be saved with it."""
_KEPT = (
    "{what} with samples of a batch that is no longer at hand, and the ranks have other shares of the one that is: the "
    "loop fetched it before it computed with the batch before, or kept a batch. Compute with a batch before the next "
    "is fetched (the loader reads ahead itself); give batches that are kept to evener.batch"
)


def marked(tree: Any, batch: PastBatch) -> Any:
    """Records ``batch`` as the batch of all tensors in ``tree``, and returns ``tree``."""

    def mark(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            _BATCH_OF[leaf] = batch
        return leaf

    return map_leaves(mark, tree)


def check_at_hand(tree: Any, current_batches: Sequence[PastBatch], what: str) -> None:
    """Checks that tensors are not from a batch that the loop has left, unless the current one has the same shares.

    Args:
        current_batches: The current batches; the last one is the innermost.

    Raises:
        ConfigurationError: If they are; on all ranks alike, because all know the shares of all.
    """
    found: list[PastBatch] = []
    map_leaves(lambda leaf: found.extend(filter(None, [_batch_of(leaf)])), tree)
    for batch in found:
        if batch not in current_batches and not (
            current_batches and current_batches[-1].shares == batch.shares
        ):
            raise ConfigurationError(_KEPT.format(what=what))


def is_of_a_batch(leaf: Any) -> bool:
    """Returns True for a tensor of a loader, and for a view of one."""
    return _batch_of(leaf) is not None


def _batch_of(leaf: Any) -> PastBatch | None:
    """Returns the batch of a tensor of a loader, or of a view of one; None for others."""
    if not isinstance(leaf, Tensor):
        return None
    whole = base_of(leaf)
    found: PastBatch | None = _BATCH_OF.get(leaf)
    return found if found is not None or whole is None else _BATCH_OF.get(whole)
