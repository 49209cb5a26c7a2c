"""How an evaluation is cut up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evener.data.worker_tuning import Choice


@dataclass(frozen=True)
class EvaluationOptions:
    """How an evaluation is cut up; nothing of it changes its result."""

    batch_size: int
    micro_batch: int | None = None
    workers: Callable[[Any], int | Choice] = lambda dataset: 0
    """Processes that read a data set, or what chooses their number."""
    ranks_beside: int = 1
    """On this machine, with this one."""
    skips: bool = False
    """Whether samples that cannot be read are left out; not of predictions, which have the order of the dataset."""
    weights: Sequence[float] | None = None
    """Parts of a batch that the ranks take; None is equal parts."""
