"""Shared tensors of the ranks of one host, with a barrier.

There is one copy of the memory for all ranks, other than with segments (:mod:`evener.distributed.shm.segment`), which
each rank has of its own. All ranks read what one rank writes. The callers must separate writes from reads by
barriers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from evener.distributed.shm.mailbox import Mailbox
from evener.distributed.shm.slots import map_segments

_ALIGNED_NBYTES = 64


class Common:
    """Tensors in memory that all ranks of a group share. All ranks must build it together.

    Args:
        group: Ranks of one host.
        shapes: Shapes and types of the tensors, the same on all ranks.
        timeout_seconds: The longest wait for a rank.
        what: Names the tensors in error messages.

    Raises:
        ConfigurationError: The ranks do not share a host, or the machine does not support it; on every rank alike.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        shapes: Sequence[tuple[torch.Size, torch.dtype]],
        timeout_seconds: float,
        what: str,
    ) -> None:
        self._box = Mailbox(group, 0, timeout_seconds, what)
        nbytes = sum(_nbytes(*each) for each in shapes)
        self._made = map_segments(group, nbytes if dist.get_rank(group) == 0 else 0, what)[0]
        self.tensors: list[Tensor] = []
        offset = 0
        for shape, dtype in shapes:
            self.tensors.append(self._made.view(dtype, offset, shape.numel()).view(shape))
            offset += _nbytes(shape, dtype)

    def barrier(self) -> None:
        """Waits until all ranks have called this.

        Raises:
            RankError: The process of a rank died.
            RankTimeoutError: A rank did not call it in time.
        """
        self._box.wait(self._box.post())


def _nbytes(shape: torch.Size, dtype: torch.dtype) -> int:
    nbytes = shape.numel() * dtype.itemsize
    return -(-nbytes // _ALIGNED_NBYTES) * _ALIGNED_NBYTES
