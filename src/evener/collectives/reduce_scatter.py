"""Reduce-scatter and all-gather of a flat tensor with ranges of unequal length.

The tensor is cut into one range for each rank, its owner. A sum goes to the owners, and a gather brings all ranges back
to all ranks::

                 range of 0   range of 1 of 2               range of 0   range of 1 of 2
    rank 0       a a a a a    b b   c               rank 0  x x x x x
    rank 1       d d d d d    e e   f               rank 1               y y
    rank 2       g g g g g    h h   i               rank 2                     z

    summed       rank 0 has a+d+g, rank 1 b+e+h     gathered     all ranks have x y z

Backends support both for equal ranges only, or with one message for each rank. So the sum uses ``all_to_all``, whose
receiver adds the terms in order of rank, and the gather broadcasts each range; all backends have these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from evener.collectives.missing_ranks import RollCall

Pending = Callable[[], Tensor]
"""Waits for the sum, and returns this rank's range of it."""


class RangeOwners(ABC):
    """Reduce-scatter and all-gather over a group in which each rank owns a range of a flat tensor.

    All ranks must make the same calls in the same order, with the same sizes. Gathered ranges are bitwise those of
    their owners.
    """

    words: str
    """The name in records of a run."""

    def prepare(self, nbytes: int) -> None:  # noqa: B027 (most need nothing)
        """Announces the size of the largest tensor to be summed. All ranks must call this together, with one size."""

    def room(self, like: Tensor, count: int) -> Tensor:
        """Allocates memory for ``count`` elements to be summed, of the type and device of ``like``. It lies where sums
        are fastest; the caller may write to it until it calls ``summed``."""
        return like.new_empty(count)

    @abstractmethod
    def summed(self, flat: Tensor, sizes: Sequence[int]) -> Pending:
        """Starts to sum ``flat`` over the ranks.

        Args:
            flat: A contiguous tensor of one dimension. Must not be written before the sum is there.
            sizes: Number of elements of each rank's range, in order.

        Returns:
            A function that waits and returns this rank's range of the sum, in separate memory.
        """

    @abstractmethod
    def gather(self, flat: Tensor, sizes: Sequence[int]) -> None:
        """Fills the ranges of the other ranks in ``flat``, in which the caller has filled this rank's range."""

    def close(self) -> None:  # noqa: B027 (most own nothing)
        """Releases resources."""


class NativeOwners(RangeOwners):
    """Uses the collectives of the group's backend."""

    words = "native"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._roll_call = group, RollCall(group)

    def summed(self, flat: Tensor, sizes: Sequence[int]) -> Pending:
        degree, own = len(sizes), sizes[self._group.rank()]
        came = flat.new_empty(degree * own)
        work = dist.all_to_all_single(
            came, flat, [own] * degree, list(sizes), group=self._group, async_op=True
        )

        def wait() -> Tensor:
            self._wait([work])
            return came.view(degree, own).sum(0, dtype=came.dtype)

        return wait

    def gather(self, flat: Tensor, sizes: Sequence[int]) -> None:
        self._wait(
            [
                dist.broadcast(piece, group=self._group, group_src=owner, async_op=True)
                for owner, piece in enumerate(flat.split_with_sizes(list(sizes)))
                if piece.numel()
            ]
        )

    def _wait(self, works: Sequence[dist.Work | None]) -> None:
        try:
            for work in works:
                assert work is not None
                work.wait()
        except RuntimeError as error:
            raise self._roll_call.explain(error) from error
