"""Two ways to bring the sum of a bucket to the owners of its rows.

::

    AllReduceMode      an all-reduce: every rank has the whole sum, of which it keeps a view of its rows       stage 1
    ReduceScatterMode  each rank gets its own rows of the sum, and nothing else                                stage 2
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from evener.collectives.base import key_of
from evener.collectives.reduce_scatter import Pending, RangeOwners
from evener.collectives.registry import make_owners
from evener.hardware.memory import made_as
from evener.hardware.memory.counters import BUCKETS
from evener.strategies.learner import Learner
from evener.strategies.reducer import all_reduce_of
from evener.strategies.sharded.buckets import Bucket
from evener.strategies.sharded.owned_weight import AXIS


class ReduceMode(ABC):
    """Sums buckets.

    Args:
        learner: Gives the mesh and the settings.
        axes: The axes over whose ranks buckets are summed, among them that of the owners. Nothing is compressed if they
            are alone.
    """

    each_micro_batch: bool
    """True if buckets are summed in every micro-batch, False if only in the last one."""
    owners: RangeOwners
    """Communication between the ranks that own rows of the same weights."""

    def __init__(self, learner: Learner, axes: Sequence[str]) -> None:
        self._learner = learner
        group = learner.mesh.new_group(AXIS)
        assert group is not None
        self.owners = make_owners(self._owners_name, group, learner.session.timeout_seconds)

    @property
    def _owners_name(self) -> str | None:
        return None

    @property
    @abstractmethod
    def words(self) -> str:
        """Description of the mode for records."""

    def prepare(self, nbytes: int) -> None:  # noqa: B027 (most need nothing)
        """Announces the size of the largest bucket in bytes. All ranks must call this together."""

    def room(self, bucket: Bucket) -> Tensor:
        """Allocates memory for a bucket that is to be summed."""
        return bucket.room()

    @abstractmethod
    def start(self, bucket: Bucket, flat: Tensor) -> Pending:
        """Starts to sum a bucket. The returned call waits and gives this rank's rows."""

    @abstractmethod
    def end(self, bucket: Bucket, own: Tensor) -> None:
        """Completes the sum of this rank's rows, after those of all micro-batches are added up."""

    def close(self) -> None:
        """Releases the resources of the mode."""
        self.owners.close()


class AllReduceMode(ReduceMode):
    """Sums for all ranks: each gets the whole sum."""

    each_micro_batch = False

    def __init__(self, learner: Learner, axes: Sequence[str]) -> None:
        super().__init__(learner, axes)
        group = learner.mesh.group(*axes)
        assert group is not None
        self._sum = all_reduce_of(learner, group, compresses=len(axes) > 1)

    @property
    def words(self) -> str:
        return f"{self._sum.words}, rows from their owners by {self.owners.words}"

    def start(self, bucket: Bucket, flat: Tensor) -> Pending:
        work = self._sum(flat, key_of(weight.whole for weight in bucket.weights))

        def wait() -> Tensor:
            work.wait()
            return flat.split_with_sizes(bucket.sizes)[bucket.rank]

        return wait

    def end(self, bucket: Bucket, own: Tensor) -> None:
        """Does nothing: the all-reduce has already summed over all ranks."""

    def close(self) -> None:
        super().close()
        self._sum.close()


class ReduceScatterMode(ReduceMode):
    """Sums for owners alone: each rank gets only its own rows."""

    each_micro_batch = True

    def __init__(self, learner: Learner, axes: Sequence[str]) -> None:
        super().__init__(learner, axes)
        group = learner.mesh.group(*(axis for axis in axes if axis != AXIS))
        self._sum = all_reduce_of(learner, group) if group is not None else None

    @property
    def _owners_name(self) -> str | None:
        return self._learner.settings.all_reduce

    @property
    def words(self) -> str:
        further = f", then {self._sum.words}" if self._sum else ""
        return f"to owners by {self.owners.words}{further}"

    def prepare(self, nbytes: int) -> None:
        self.owners.prepare(nbytes)

    def room(self, bucket: Bucket) -> Tensor:
        with made_as(BUCKETS):
            return self.owners.room(bucket.like, sum(bucket.sizes))

    def start(self, bucket: Bucket, flat: Tensor) -> Pending:
        return self.owners.summed(flat, bucket.sizes)

    def end(self, bucket: Bucket, own: Tensor) -> None:
        if self._sum is not None:
            self._sum(own).wait()

    def close(self) -> None:
        super().close()
        if self._sum is not None:
            self._sum.close()
