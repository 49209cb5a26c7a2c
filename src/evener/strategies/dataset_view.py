"""What this rank reads of a data set, for each of the three ways to partition one.

===========  ==============================================  ==========================================
partition    a rank reads                                    said by
===========  ==============================================  ==========================================
by batch     its share of every batch, of one data set       nothing: it is what happens
             that all ranks can read
by sample    the part that it alone holds                    ``Task(partition="sample")``
by           its columns of every sample                     ``strategy="dimension"``
dimension
===========  ==============================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from evener.data.loader import Loader
from evener.data.local_shards import Parts, gather_parts
from evener.data.sampler import ListedOrder, Order
from evener.errors import ConfigurationError
from evener.strategies.learner import Learner

Listing = Callable[[int], Any]
"""From the number of an epoch to the numbers of its samples."""


@dataclass(frozen=True)
class Reading:
    """A data set as this rank reads it."""

    dataset: Any
    name: str
    """What errors call it."""
    rank: int
    """Which part of a batch is this rank's."""
    ranks: int
    """How many parts a batch has."""
    parts: Parts | None
    """Where each rank owns samples of its own."""
    balanced: bool
    """Whether the ranks may take any shares of a batch."""
    agree: Callable[[int], list[int]]
    """Gathers an integer of each part of a batch."""
    listed: ListedOrder | None = None
    """The order of samples, where the task gives one."""

    @classmethod
    def of(cls, learner: Learner, dataset: Any, name: str, listed: Listing | None = None) -> Reading:
        """How the rank of ``learner`` reads ``dataset``. All ranks call it together.

        Args:
            listed: The task's own order of samples, if it has one.

        Raises:
            ConfigurationError: If the partition cannot be, or the task's order lists no samples of the data set.
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
        return cls(portion, name, data.index, data.degree, parts, balanced, agree, order)

    @property
    def size(self) -> int | None:
        """Samples over all ranks; None if the data set does not tell."""
        if self.parts is not None:
            return self.parts.size
        if self.listed is not None:
            return self.listed.size
        return len(self.dataset) if hasattr(self.dataset, "__len__") else None

    def shuffled(self, seed: int) -> Order | None:
        """The task's order, or a shuffled one of what this rank reads; an iterable data set has none."""
        if self.listed is not None:
            return self.listed
        if self.parts is not None:
            return self.parts.order(seed)
        return None if isinstance(self.dataset, IterableDataset) else Order(len(self.dataset), seed=seed)

    def loader(self, order: Order | None, **options: Any) -> Loader:
        """A loader of it."""
        place: dict[str, Any] = {"rank": self.rank, "world_size": self.ranks, "parts": self.parts}
        return Loader(self.dataset, order, name=self.name, agree=self.agree, **place, **options)


def _order(listed: Listing, dataset: Any, parts: Parts | None) -> ListedOrder:
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
