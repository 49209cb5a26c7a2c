"""What the ranks of a pipeline send each other, in order, without any of them waiting for a receiver.

Between two ranks messages in one direction never pass each other: they are received in the order in which they were
sent, whichever is needed first, and what came too early is kept. The two directions have a group each, since on a
device one group is one queue, in which a send that waits for its receiver would hold up what comes the other way.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evener.hardware.stopwatch import waiting
from evener.runtime.mesh import Mesh
from evener.runtime.watchdog import marked


class Line:
    """Between the ranks along one axis of a mesh, which make it together."""

    def __init__(self, mesh: Mesh, axis: str, device: torch.device) -> None:
        self._index, self._device = mesh.index(axis), device
        self._groups = {rising: mesh.new_group(axis) for rising in (True, False)}
        self._under_way: list[tuple[dist.Work | None, Tensor]] = []

    def _group(self, rising: bool) -> dist.ProcessGroup:
        group = self._groups[rising]
        assert group is not None
        return group

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Sends them to rank ``to`` of the axis, and waits for nothing."""
        for tensor in tensors:
            moved = tensor.detach().contiguous()
            work = dist.isend(moved, group=self._group(to > self._index), group_dst=to)
            self._under_way.append((work, moved))

    def receive(self, rooms: Sequence[Tensor], source: int) -> None:
        """Fills ``rooms`` with what rank ``source`` of the axis sent next."""
        with waiting(), marked("another stage of the pipeline"):
            for room in rooms:
                dist.recv(room, group=self._group(self._index > source), group_src=source)

    def tell(self, words: Any, to: int) -> None:
        """Sends an object that can be pickled."""
        text = torch.frombuffer(bytearray(pickle.dumps(words)), dtype=torch.uint8).to(self._device)
        self.send([torch.tensor([len(text)], device=self._device), text], to)

    def hear(self, source: int) -> Any:
        """The object that rank ``source`` told next. The host waits for it."""
        length = torch.zeros(1, dtype=torch.int64, device=self._device)
        self.receive([length], source)
        text = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        self.receive([text], source)
        return pickle.load(io.BytesIO(bytes(text.cpu().tolist())))

    def finish(self) -> None:
        """All that was sent has come."""
        with waiting(), marked("another stage of the pipeline"):
            for work, _ in self._under_way:
                if work is not None:
                    work.wait()
        self._under_way.clear()


Key = Any


class Inbox:
    """What comes from one rank, in the order ``expected``; taken in any.

    Args:
        receive: Receives what is named, which is the next one.
    """

    def __init__(self, expected: Sequence[Key], receive: Callable[[Key], Any]) -> None:
        self._expected, self._receive = list(expected), receive
        self._kept: dict[Key, Any] = {}

    def take(self, key: Key) -> Any:
        """What is named, when it has come."""
        while key not in self._kept:
            following = self._expected.pop(0)
            self._kept[following] = self._receive(following)
        return self._kept.pop(key)
