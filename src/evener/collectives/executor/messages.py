"""Point-to-point messages between the ranks of a group, over a separate process group.

The separate group has the same backend. It keeps the messages apart from collectives that the program has under way,
and has its own timeout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from evener.collectives.executor.subgroup import subgroup
from evener.distributed.hosts import destroy

Message = tuple[int, Tensor]
"""(rank in the group, contiguous tensor to send or to receive into)."""


class Messages:
    """Sends and receives between the ranks of ``group``. All ranks of the group must build it together.

    Messages between two ranks with the same tag are received in the order in which they were sent. A wait raises
    RuntimeError after the timeout.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        made = subgroup(group, range(dist.get_world_size(group)), timeout_seconds)
        assert made is not None
        self._group: dist.ProcessGroup | None = made

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> tuple[list[dist.Work], list[dist.Work]]:
        """Starts to send and to receive. Returns the works of the sends and those of the receives.

        For CUDA tensors all works are among those of the receives.
        """
        if any(tensor.is_cuda for _, tensor in (*sends, *receives)):
            return [], self._post_batch(sends, receives)
        assert self._group is not None
        received = [self._group.recv([tensor], rank, tag) for rank, tensor in receives]
        return [self._group.send([tensor], rank, tag) for rank, tensor in sends], received

    def _post_batch(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[dist.Work]:
        """Posts all messages in one NCCL group call, in which no send waits for a receive; on the current stream."""
        operations = [
            dist.P2POp(kind, tensor, group=self._group, group_peer=rank)
            for kind, messages in ((dist.isend, sends), (dist.irecv, receives))
            for rank, tensor in messages
        ]
        works: list[dist.Work] = dist.batch_isend_irecv(operations)
        return works

    def close(self) -> None:
        """Destroys the process group. No message may be under way."""
        if self._group is not None:
            destroy(self._group)
            self._group = None
