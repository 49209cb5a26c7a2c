"""Those who compute a micro-batch together, as a layer that looks at all of its samples meets them.

Mostly these are the ranks of a process group. Where one process computes on several devices they are its threads, which
need no message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from evener.hardware.stopwatch import waiting


class Peers(ABC):
    """All of them make the same calls, with tensors of one shape."""

    what: str
    """What they are, in the plural, for messages."""

    @abstractmethod
    def size(self) -> int:
        """How many there are."""

    @abstractmethod
    def all_gather(self, message: Tensor) -> Tensor:
        """(peers, length): the (length,) message of every peer, in their order."""

    @abstractmethod
    def all_reduce(self, message: Tensor) -> Tensor:
        """The sum over the peers, which may be ``message`` itself."""


class Ranks(Peers):
    """The ranks of a process group."""

    what = "ranks"

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def size(self) -> int:
        return self._group.size()

    def all_gather(self, message: Tensor) -> Tensor:
        sent = message.to(self._message_device(message))
        received = sent.new_empty(self.size(), *sent.shape)
        with waiting():
            dist.all_gather(list(received.unbind()), sent, group=self._group)
        return received.to(message.device)

    def all_reduce(self, message: Tensor) -> Tensor:
        moved = message.to(self._message_device(message))
        with waiting():
            dist.all_reduce(moved, group=self._group)
        return moved.to(message.device)

    def _message_device(self, x: Tensor) -> torch.device:
        """Where the group's messages live: gloo's on the CPU."""
        return torch.device("cpu") if dist.get_backend(self._group) == "gloo" else x.device
