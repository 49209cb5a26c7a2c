"""What the stages of a pipeline send each other, known by its form alone.

A stage makes room for what comes before it comes, and learns its form from who sends it. Ranks are estimated one after
the other, and a first one needs the form of what later ones send back. So a rank that needs something that nobody has
sent yet is given up, and estimated once more when the others have said what they send::

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
from evener.strategies.pipeline.p2p import Line


class NotYetSentError(Exception):
    """Another rank has to be estimated first."""


class PostOffice:
    """Forms that ranks have told each other, by sender and receiver, in the order in which they were sent."""

    def __init__(self) -> None:
        self.told: dict[tuple[int, int], list[Any]] = defaultdict(list)

    @property
    def sent(self) -> int:
        """How many there are."""
        return sum(map(len, self.told.values()))

    def line(self, mesh: Mesh, axis: str, device: torch.device) -> Line:
        """Of a rank; a new one begins from the start."""
        return PretendedLine(self, mesh, axis, device)


class PretendedLine(Line):
    """Sends are over at once, and what is received is room without numbers."""

    def __init__(self, office: PostOffice, mesh: Mesh, axis: str, device: torch.device) -> None:
        self._office, self._own = office, mesh.rank
        self._ranks = mesh.ranks(axis)
        self._sent: dict[int, int] = defaultdict(int)
        self._heard: dict[int, int] = defaultdict(int)
        self._index, self._device = mesh.index(axis), device
        self._kept: list[Tensor] = []

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        self._kept += [tensor.detach().contiguous() for tensor in tensors]

    def receive(self, rooms: Sequence[Tensor], source: int) -> list[dist.Work | None]:
        return []

    @property
    def runs_ahead(self) -> bool:
        return self._device.type == "cpu"

    def wait(self, under_way: Iterable[dist.Work | None]) -> None:
        pass

    def tell(self, words: Any, to: int) -> None:
        told = self._office.told[self._own, self._ranks[to]]
        if self._sent[to] == len(told):
            told.append(words)
        self._sent[to] += 1

    def hear(self, source: int) -> Any:
        told = self._office.told[self._ranks[source], self._own]
        place = self._heard[source]
        self._heard[source] += 1
        if place >= len(told):
            raise NotYetSentError
        return told[place]

    def finish(self) -> None:
        self._kept.clear()

    def one_way(self, nbytes: int) -> float:
        return 0.0
