"""Those who compute a micro-batch together, as a layer that looks at all of its samples meets them.

Mostly these are the ranks of a process group. Where one process computes on several devices they are its threads, which
need no message; ranks of one host have :mod:`evener.strategies.batch_norm_shm`.

A message is posted, and what came of all is asked for later::

    later = peers.all_gather_later(message, "layer1.bn")      posts it
    ...                                                       work that needs no answer
    later()                                                   waits for the others
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from evener.hardware.timers import waiting

Later = Callable[[], Tensor]
"""Waits for the others; called once, before the next message is posted."""


class Peers(ABC):
    """All of them make the same calls, with tensors of one shape."""

    what: str
    """What they are, in the plural, for messages."""
    is_by_batches = False
    """Whether only what is computed within a scope is divided over them: a pass outside of one is the same on all."""

    @abstractmethod
    def size(self) -> int:
        """How many there are."""

    @abstractmethod
    def all_gather_later(self, message: Tensor, of: str) -> Later:
        """Will give (peers, length): the (length,) message of every peer, in their order.

        Args:
            message: Not to be changed before the answer is there.
            of: What it is about, on all alike, for errors.
        """

    def all_reduce_later(self, message: Tensor, of: str) -> Later:
        """Will give the sum over the peers, the same bits on all, which may be ``message`` itself."""
        later = self.all_gather_later(message, of)
        return lambda: later().sum(0)


class Ranks(Peers):
    """The ranks of a process group."""

    what = "ranks"

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def size(self) -> int:
        return self._group.size()

    def all_gather_later(self, message: Tensor, of: str) -> Later:
        sent = message.to(self._message_device(message))
        received = sent.new_empty(self.size(), *sent.shape)
        work = dist.all_gather(list(received.unbind()), sent, group=self._group, async_op=True)
        return _when_done(work, received, message.device)

    def all_reduce_later(self, message: Tensor, of: str) -> Later:
        moved = message.to(self._message_device(message))
        work = dist.all_reduce(moved, group=self._group, async_op=True)
        return _when_done(work, moved, message.device)

    def _message_device(self, x: Tensor) -> torch.device:
        """Where the group's messages live: gloo's on the CPU."""
        return torch.device("cpu") if dist.get_backend(self._group) == "gloo" else x.device


def _when_done(work: dist.Work | None, received: Tensor, device: torch.device) -> Later:
    def later() -> Tensor:
        with waiting():
            if work is not None:
                work.wait()
        return received.to(device)

    return later
