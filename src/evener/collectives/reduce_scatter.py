"""Sums that go to the owners of ranges, and ranges that come from their owners.

A flat tensor is cut into one range for each rank, of any lengths::

                 range of 0   range of 1 of 2               range of 0   range of 1 of 2
    rank 0       a a a a a    b b   c               rank 0  x x x x x
    rank 1       d d d d d    e e   f               rank 1               y y
    rank 2       g g g g g    h h   i               rank 2                     z

    summed       rank 0 has a+d+g, rank 1 b+e+h     gathered     all ranks have x y z

Backends have both for equal ranges only, or as one message for each rank. What serves here on all of them is an
``all_to_all``, whose receiver adds the terms in order of rank, and a broadcast of each range.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from evener.collectives.missing_ranks import RollCall

Pending = Callable[[], Tensor]
"""Waits for what is under way, and returns it."""


class Owners(ABC):
    """The ranks of a group, each of which owns a range of what they sum and gather.

    All ranks call it in the same order with the same sizes. Each range has the same bits on all ranks: those of its
    owner.
    """

    words: str
    """What records call it."""

    def prepare(self, nbytes: int) -> None:  # noqa: B027 (most need nothing)
        """Says how large the tensors are that will be summed, the same on all ranks. A collective call."""

    def room(self, like: Tensor, count: int) -> Tensor:
        """Memory for ``count`` elements that are to be summed, of the type and device of ``like``: where it is summed
        fastest, and one's own until then."""
        return like.new_empty(count)

    @abstractmethod
    def summed(self, flat: Tensor, sizes: Sequence[int]) -> Pending:
        """Starts to sum ``flat`` over the ranks.

        Args:
            flat: Of one dimension and contiguous; not to be written before the sum is there.
            sizes: Elements of each rank's range, in order.

        Returns:
            Gives this rank's range of the sum, in memory of its own.
        """

    @abstractmethod
    def gather(self, flat: Tensor, sizes: Sequence[int]) -> None:
        """Fills the ranges of the other ranks in ``flat``, which holds this rank's."""

    def close(self) -> None:  # noqa: B027 (most own nothing)
        """Gives back what it owns."""


class NativeOwners(Owners):
    """Through the collectives of the group's backend."""

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
