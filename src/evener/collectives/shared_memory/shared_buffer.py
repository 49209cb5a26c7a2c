"""Memory that ranks of one host have in common, and where they meet before one of them writes to it.

Other than a segment of each rank (:mod:`evener.distributed.shm.segment`), it is there once, whoever made it: what one
rank writes all read. Nothing tells when that is safe but the order of the callers' own steps, between which they meet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from evener.distributed.shm.slots import ENTERED, Slots, map_segments

_ALIGNED_NBYTES = 64


class Common:
    """Tensors that all ranks of a group have in one place.

    Args:
        group: Ranks of one host.
        shapes: Of the tensors, with their types; alike on all ranks.
        timeout_seconds: How long to wait for a rank.
        what: What they are, for errors.

    Raises:
        ConfigurationError: The ranks do not share a host, or the machine cannot do it; on every rank alike.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        shapes: Sequence[tuple[torch.Size, torch.dtype]],
        timeout_seconds: float,
        what: str,
    ) -> None:
        self._met = 0
        self._slots = Slots(group, 1, _ALIGNED_NBYTES, timeout_seconds, what)
        nbytes = sum(_nbytes(*each) for each in shapes)
        self._made = map_segments(group, nbytes if dist.get_rank(group) == 0 else 0, what)[0]
        self.tensors: list[Tensor] = []
        offset = 0
        for shape, dtype in shapes:
            self.tensors.append(self._made.view(dtype, offset, shape.numel()).view(shape))
            offset += _nbytes(shape, dtype)

    def meet(self) -> None:
        """Returns when all ranks have come here.

        Raises:
            RankError: The process of a rank is gone.
            RankTimeoutError: A rank did not come in time.
        """
        self._met += 1
        self._slots.count_call()
        self._slots.publish(ENTERED, self._met)
        self._slots.wait(ENTERED, self._met)


def _nbytes(shape: torch.Size, dtype: torch.dtype) -> int:
    nbytes = shape.numel() * dtype.itemsize
    return -(-nbytes // _ALIGNED_NBYTES) * _ALIGNED_NBYTES
