"""Peers: the workers that compute a micro-batch together, for layers that exchange statistics over all samples.

Mostly the peers are the ranks of a process group. If one process computes on several devices, they are its threads,
which send no messages. The ranks of one host can use :mod:`evener.strategies.batch_norm_shm`.

A peer posts a message and asks for the result later::

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
"""Waits for the other peers and returns the result. Must be called once, before the next message is posted."""


class Peers(ABC):
    """Exchanges messages between peers. All peers must make the same calls, with tensors of the same shape."""

    what: str
    """The plural noun for the peers in error messages, such as "ranks"."""
    is_by_batches = False
    """True if the batch is divided over the peers only inside a scope; a pass outside is the same on all of them."""

    @abstractmethod
    def size(self) -> int:
        """Returns the number of peers."""

    @abstractmethod
    def all_gather_later(self, message: Tensor, of: str) -> Later:
        """Posts a message. The returned function gives (peers, length): every peer's (length,) message, in their order.

        Args:
            message: Must not be changed before the result is there.
            of: Names the exchange, for error messages; the same on all peers.
        """

    def all_reduce_later(self, message: Tensor, of: str) -> Later:
        """Posts a message. The returned function gives the sum over the peers, bitwise the same on all. The sum may be
        written into ``message``."""
        later = self.all_gather_later(message, of)
        return lambda: later().sum(0)


class PeerRanks(Peers):
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
        """Returns the device of the group's messages: the CPU for gloo, else that of ``x``."""
        return torch.device("cpu") if dist.get_backend(self._group) == "gloo" else x.device


def _when_done(work: dist.Work | None, received: Tensor, device: torch.device) -> Later:
    def later() -> Tensor:
        with waiting():
            if work is not None:
                work.wait()
        return received.to(device)

    return later
