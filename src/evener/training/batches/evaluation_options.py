"""Options for dividing an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EvaluationOptions:
    """Options for dividing an evaluation over ranks and micro-batches. They do not change its result."""

    batch_size: int
    micro_batch: int | None = None
    workers: int = 0
    """Number of reading processes for each rank."""
    skips: bool = False
    """True if unreadable samples are skipped. Never for predictions, which have the order of the dataset."""
    weights: Sequence[float] | None = None
    """Relative shares of a batch for the ranks. None means equal shares."""
    max_shares: Sequence[int | None] | None = None
    """The most samples of each rank in a batch."""
    share_multiple_of: int = 1
    measures: bool = False
    """True if the ranks' speeds decide their shares, and are not known yet."""
