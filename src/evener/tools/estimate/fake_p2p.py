"""Simulates the messages between pipeline stages by their metadata alone.

A stage learns the shapes of a tensor from its sender, and allocates a buffer before it receives the tensor. Ranks are
estimated one after the other, but an early rank needs metadata that later ranks send back. So the estimate of a rank
that needs a message which no rank has sent yet is abandoned. It is repeated after the other ranks have sent theirs::

    rank 0    sends forward ─ needs what rank 1 sends back ✗          again ─────────▶ done
    rank 1                    sends forward ─ needs ... ✗     again ─▶ sends back, done
    rank 2                                      sends back, done
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evener.distributed.mesh import Mesh
from evener.strategies.pipeline.p2p import P2PChannel
from evener.tools.estimate.traffic import Traffic


class NotYetSentError(Exception):
    """Raised if another rank must be estimated first."""


class PostOffice:
    """Metadata that ranks have sent, by sender and receiver, in the order of sending."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, int], list[Any]] = defaultdict(list)

    @property
    def sent(self) -> int:
        """Number of messages sent so far."""
        return sum(map(len, self.messages.values()))

    def line(self, mesh: Mesh, axis: str, device: torch.device, traffic: Traffic) -> P2PChannel:
        """Returns the channel of a rank. A new channel reads and repeats all messages from the start."""
        return PretendedLine(self, mesh, axis, device, traffic)


class PretendedLine(P2PChannel):
    """A channel whose sends complete at once. Received tensors are buffers without values."""

    def __init__(
        self, office: PostOffice, mesh: Mesh, axis: str, device: torch.device, traffic: Traffic
    ) -> None:
        self._office, self._own, self._traffic = office, mesh.rank, traffic
        self._ranks = mesh.ranks(axis)
        self._sent: dict[int, int] = defaultdict(int)
        self._heard: dict[int, int] = defaultdict(int)
        self._index, self._device = mesh.index(axis), device
        self._kept: list[Tensor] = []

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self._traffic.add("send", (self._own, self._ranks[to]), nbytes)
        self._kept += [tensor.detach().contiguous() for tensor in tensors]

    def receive(self, rooms: Sequence[Tensor], source: int) -> list[dist.Work | None]:
        return []

    @property
    def runs_ahead(self) -> bool:
        return self._device.type == "cpu"

    def wait(self, under_way: Iterable[dist.Work | None]) -> None:
        pass

    def send_object(self, message: Any, to: int) -> None:
        messages = self._office.messages[self._own, self._ranks[to]]
        if self._sent[to] == len(messages):
            messages.append(message)
        self._sent[to] += 1

    def receive_object(self, source: int) -> Any:
        messages = self._office.messages[self._ranks[source], self._own]
        place = self._heard[source]
        self._heard[source] += 1
        if place >= len(messages):
            raise NotYetSentError
        return messages[place]

    def finish(self) -> None:
        self._kept.clear()

    def one_way(self, nbytes: int) -> float:
        return 0.0
