"""Several parameter servers: each of the first ranks holds a shard of the weights, and all take the same steps.

Rank 0 decides what merges when, and writes each decision to a log that the other servers follow in its order. Gradients
and weights do not pass through rank 0: they go between workers and the servers that hold them::

    rank 0    give 2 ─ add 1 ─ give 1 ─ add 2 ─ merge ─ give 2 ...      the log
    rank 1    weights to 2 ─ gradients of 1 added ─ ...                 follows it

So every worker computes with one version of all weights, and a run can be repeated as with one server.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from evener.hardware import accelerators
from evener.hardware.timers import waiting
from evener.strategies.asynchronous.flat_parameters import FlatLayout
from evener.strategies.asynchronous.weight_shard import WeightShard

_LOG, _GRADIENTS, _WEIGHTS = 2, 3, 4
"""Tags of messages."""
_GIVE, _ADD, _MERGE, _END = range(4)
_NUMBERS = 4
_MOST_ENTRIES = 256
_POLL_SECONDS = 1.0


class ServerLog:
    """The decisions of rank 0, as it sends them to the other servers.

    Args:
        group: All ranks.
        places: For each server the places of its parameters among the trained ones. The first is rank 0.
    """

    def __init__(self, group: dist.ProcessGroup, places: Sequence[range]) -> None:
        self._group, self._places = group, places
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def give(self, worker: int) -> None:
        """Lets a worker have the weights of now."""
        self._send([_GIVE, worker])

    def add(self, worker: int, weight: float) -> None:
        """Adds the gradients of a worker to those of the next version. With a weight of 0 they are dropped."""
        self._send([_ADD, worker, weight])

    def merge(self, factor: float, schedule: int, has_gradient: Sequence[float]) -> None:
        """Makes the next version of the weights. See :meth:`WeightShard.merge`."""
        self._send([_MERGE, 0, factor, schedule], has_gradient)

    def end(self) -> None:
        """Ends the section, and waits until all servers have read the log."""
        with waiting():
            self._send([_END])
            self._keep(0)

    def _keep(self, most: int) -> None:
        """Waits until at most so many entries are on their way. The threads of other workers call this while that of
        this rank computes, whose clock goes on."""
        while len(self._sent) > most:
            self._sent.popleft()[0].wait()

    def _send(self, numbers: Sequence[float], has_gradient: Sequence[float] = ()) -> None:
        self._keep(_MOST_ENTRIES)
        for server, places in list(enumerate(self._places))[1:]:
            entry = torch.zeros(_NUMBERS + len(places), dtype=torch.float64)
            entry[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
            if has_gradient:
                entry[_NUMBERS:] = torch.tensor(has_gradient[places.start : places.stop])
            self._sent.append((_sent(entry, self._group, server, _LOG), entry))


class ShardServer:
    """Holds a shard of the weights on another rank than 0, and follows the log in a thread.

    Args:
        group: All ranks.
    """

    def __init__(self, shard: WeightShard, layout: FlatLayout, group: dist.ProcessGroup) -> None:
        self._shard, self._layout, self._group = shard, layout, group
        self._rank = dist.get_rank(group)
        self._step = 0
        self._awaited: dict[int, tuple[list[dist.Work], list[Tensor]]] = {}
        """For each other worker that has weights, the gradients that it will send."""
        self._sent: dict[int, list[tuple[dist.Work, Tensor]]] = {}
        """For each other worker the weights that were sent last."""
        self.gradients: queue.SimpleQueue[list[Tensor]] = queue.SimpleQueue()
        """The gradients of this rank's own worker."""
        self.weights: queue.SimpleQueue[list[Tensor]] = queue.SimpleQueue()
        """The weights for this rank's own worker."""
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None
        """An error in an update, or in following the log."""

    def open(self, step: int) -> None:
        """Begins a section with the weights that the model has now."""
        self._step, self.error = step, None
        self._shard.open()
        self._thread = threading.Thread(target=self._follow, name="evener-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends a section: the model gets the weights of this shard.

        Raises:
            Exception: That of an update.
        """
        assert self._thread is not None
        with waiting():
            self._thread.join()
        self._shard.close()
        if self.error is not None:
            raise self.error

    def _follow(self) -> None:
        accelerators.set_current(self._layout.device)
        try:
            while self._is_carried_out(self._entry()):
                pass
        except Exception as error:  # a connection is broken, and rank 0 or a worker with it
            self.error = self.error or error

    def _entry(self) -> list[float]:
        entry = torch.empty(_NUMBERS + len(self._layout.parameters), dtype=torch.float64)
        _received(entry, self._group, 0, _LOG).wait()
        return list(entry.tolist())

    def _is_carried_out(self, entry: list[float]) -> bool:
        """Carries out an entry of the log. Returns False if it ends the section.

        After an error in an update weights stay as they are, and workers still get them, so that all come to the end.
        """
        kind, worker, number, schedule, *has_gradient = entry
        if kind == _GIVE:
            self._give(int(worker))
        elif kind == _ADD:
            gradients = self._taken(int(worker))
            if number:
                self._shard.add(gradients, number)
        elif kind == _MERGE and self.error is None:
            try:
                self._shard.merge(self._step, number, has_gradient, int(schedule))
            except Exception as error:  # of the task's own optimizer or schedule
                self.error = error
        return kind != _END

    def _give(self, worker: int) -> None:
        version = self._shard.version()
        if worker == self._rank:
            self.weights.put(version)
            return
        room = self._layout.empty("cpu")
        works = [_received(flat, self._group, worker, _GRADIENTS) for flat in room]
        self._awaited[worker] = works, room
        for work, _ in self._sent.get(worker, ()):  # which it has, for it has sent gradients since
            work.wait()
        flats = [flat.cpu() for flat in version]
        self._sent[worker] = [(_sent(flat, self._group, worker, _WEIGHTS), flat) for flat in flats]

    def own_weights(self) -> list[Tensor]:
        """Returns the weights for this rank's own worker. Waits until they are given.

        Raises:
            Exception: What has ended the server.
        """
        assert self._thread is not None
        while True:
            try:
                return self.weights.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if not self._thread.is_alive() and self.error is not None:
                    raise self.error from None

    def _taken(self, worker: int) -> list[Tensor]:
        """Returns the gradients of a worker, which has sent them or will at once."""
        if worker == self._rank:
            return self.gradients.get()
        works, room = self._awaited.pop(worker)
        for work in works:
            work.wait()
        return room


class ShardLinks:
    """A worker's connections with the servers of other weights than those of rank 0.

    Args:
        layouts: The parameters of all servers.
        own: The server on this rank. None if there is none, or on rank 0.
    """

    def __init__(
        self, group: dist.ProcessGroup, layouts: Sequence[FlatLayout], own: ShardServer | None
    ) -> None:
        self._group, self._own, self._rank = group, own, dist.get_rank(group)
        self._layouts = list(enumerate(layouts))[1:]

    def send(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Sends flat gradients to their servers.

        Args:
            gradients: Those for each server, rank 0 included.
        """
        sent: list[tuple[dist.Work, Tensor]] = []
        for server, _ in self._layouts:
            if server == self._rank and self._own is not None:
                self._own.gradients.put([flat.clone() for flat in gradients[server]])
            else:
                flats = [flat.cpu() for flat in gradients[server]]
                sent += [(_sent(flat, self._group, server, _GRADIENTS), flat) for flat in flats]
        for work, _ in sent:
            work.wait()

    def receive(self) -> list[list[Tensor]]:
        """Returns the flat weights of each server but rank 0, of the version that rank 0 has chosen."""
        rooms = {server: layout.empty("cpu") for server, layout in self._layouts if server != self._rank}
        works = [
            _received(flat, self._group, server, _WEIGHTS) for server, room in rooms.items() for flat in room
        ]
        for work in works:
            work.wait()
        if self._own is not None:
            rooms[self._rank] = self._own.own_weights()
        return [rooms[server] for server, _ in self._layouts]


def _sent(tensor: Tensor, group: dist.ProcessGroup, rank: int, tag: int) -> dist.Work:
    work = dist.isend(tensor, group=group, group_dst=rank, tag=tag)
    assert work is not None
    return work


def _received(tensor: Tensor, group: dist.ProcessGroup, rank: int, tag: int) -> dist.Work:
    work = dist.irecv(tensor, group=group, group_src=rank, tag=tag)
    assert work is not None
    return work
