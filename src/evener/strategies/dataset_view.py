"""The part of a data set that this rank reads, for each of the three ways to partition data.

===========  ==============================================  ==========================================
partition    a rank reads                                    chosen by
===========  ==============================================  ==========================================
by batch     its share of every batch, of one data set       default
             that all ranks can read
by sample    the samples that it alone holds                 ``Task(partition="sample")``
by           its columns of every sample                     ``strategy="dimension"``
dimension
===========  ==============================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from evener.data.local_shards import LocalShards, gather_parts
from evener.data.sampler import ListedOrder, Order
from evener.errors import ConfigurationError
from evener.strategies.learner import Learner

Listing = Callable[[int], Any]
"""Maps an epoch number to the numbers of the epoch's samples."""


@dataclass(frozen=True)
class Reading:
    """A data set as this rank reads it."""

    dataset: Any
    name: str
    """The name of the data set in error messages."""
    rank: int
    """The number of this rank's part of a batch."""
    ranks: int
    """The number of parts of a batch."""
    parts: LocalShards | None
    """The ranks' own samples, if the data are partitioned by sample; else None."""
    balanced: bool
    """True if ranks may take any shares of a batch, so that load balancing can adapt them."""
    agree: Callable[[int], list[int]]
    """Gathers one integer from each part of a batch. All ranks must call it together."""
    listed: ListedOrder | None = None
    """The order of samples, if the task defines one."""
    own_order: Callable[[int], Order] | None = None
    """Maps a seed to the order of the data set, if it has an order of its own."""

    @classmethod
    def from_learner(
        cls, learner: Learner, dataset: Any, name: str, listed: Listing | None = None
    ) -> Reading:
        """Returns how the rank of ``learner`` reads ``dataset``. All ranks must call this together.

        Args:
            listed: The task's own order of samples, if it has one.

        Raises:
            ConfigurationError: If the data cannot be partitioned this way, or the task's order does not fit the data
                set.
        """
        session, data = learner.session, learner.data
        portion, parts = learner.portion(dataset), None
        if learner.task.partition == "sample":
            _check_whole(learner)
            portion, parts = gather_parts(portion, session.rank, session.control.gather_objects, name)

        def agree(value: int) -> list[int]:
            rows = session.control.exchange([value]).wait()
            return [int(row[0]) for row in data.of_parts(rows)]

        balanced = parts is None and (data.is_whole or data.degree > 1)
        order = _order(listed, dataset, parts) if listed else None
        own_order = getattr(dataset, "global_order", None) if parts is None or len(dataset) else None
        return cls(portion, name, data.index, data.degree, parts, balanced, agree, order, own_order)

    @property
    def size(self) -> int | None:
        """The number of samples over all ranks. None if the data set does not tell it."""
        if self.parts is not None:
            return self.parts.size
        if self.listed is not None:
            return self.listed.size
        return len(self.dataset) if hasattr(self.dataset, "__len__") else None

    def shuffled(self, seed: int) -> Order | None:
        """Returns the task's order, or a shuffled order of the samples that this rank reads. Returns None for an
        iterable data set."""
        if self.listed is not None:
            return self.listed
        own = self.parts.order(seed) if self.parts is not None else None
        if self.own_order is not None:
            return self.own_order(seed if own is None else own.seed)
        if own is not None:
            return own
        return None if isinstance(self.dataset, IterableDataset) else Order(len(self.dataset), seed=seed)


def _order(listed: Listing, dataset: Any, parts: LocalShards | None) -> ListedOrder:
    if parts is not None or not hasattr(dataset, "__len__"):
        kind = "data that are partitioned by sample" if parts is not None else "an iterable data set"
        raise ConfigurationError(
            f"Task.order lists samples by their numbers, which {kind} has not: leave it out"
        )
    return ListedOrder.of_task(listed, len(dataset))


def _check_whole(learner: Learner) -> None:
    if not learner.data.is_whole:
        raise ConfigurationError(
            f"strategy {learner.name!r} gives several ranks the same samples, but the task's data are partitioned by "
            'sample; use strategy="ddp", or let every rank hold all samples'
        )
