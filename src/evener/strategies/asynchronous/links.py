"""The connection of a worker with the parameter server: by calls on the server's rank, by messages elsewhere.

Messages go through a gloo group of their own, from and to host memory, so that a rank on a GPU needs no stream for
them. For each worker of another rank a thread of the server's rank waits for requests, and answers them::

    rank 1    request: numbers and row ─ gradients ──▶ thread of rank 1 on rank 0 ──▶ server.trade
              reply:   numbers and row ─ weights   ◀──

Where a message is expected, gloo sends it at once. Otherwise its two ends have to agree first, which on some machines
takes as long as computing a small range. So a range costs few messages, and gradients and weights are always expected.

If a connection breaks, the server takes back what the worker had leased, and the others go on.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from evener.hardware import accelerators
from evener.strategies.asynchronous.flat_parameters import FlatLayout
from evener.strategies.asynchronous.ledger import Lease
from evener.strategies.asynchronous.server import ParameterServer, Pushed, Reply

_NUMBERS = 8
_TRADE, _DRAW = 0.0, 1.0
_BEGUN, _REVOKED, _OVER = 0.0, 1.0, 2.0
_NUMERIC, _TENSORS = 0, 1
"""Tags of messages."""
_NONE = -1


class ServerLink(ABC):
    """A worker's connection with the server."""

    @abstractmethod
    def trade(self, pushed: Pushed | None, begin: int | None) -> Reply:
        """As :meth:`ParameterServer.trade`."""

    @abstractmethod
    def draw(self) -> Lease | None:
        """As :meth:`ParameterServer.draw`."""


class LocalLink(ServerLink):
    """The connection of the worker on the server's rank."""

    def __init__(self, server: ParameterServer, worker: int) -> None:
        self._server, self._worker = server, worker

    def trade(self, pushed: Pushed | None, begin: int | None) -> Reply:
        return self._server.trade(self._worker, pushed, begin)

    def draw(self) -> Lease | None:
        return self._server.draw(self._worker)


class _Messages:
    """Sends numbers and tensors to another rank of a group, and receives them."""

    def __init__(self, group: dist.ProcessGroup, peer: int, layout: FlatLayout) -> None:
        self._group, self._peer = group, peer
        self.room = layout.empty("cpu")
        self._short = len(layout.parameters)
        """The length of a row that goes with the numbers. A longer one is a message of its own."""
        self._expected: list[dist.Work] = []
        self.nbytes = 0
        """Bytes of messages so far, in both directions."""

    def expect(self) -> None:
        """Makes ready for flat tensors, which come with one of the next messages."""
        self._expected = [self._receive(flat, _TENSORS) for flat in self.room]

    def send(self, numbers: list[float], row: Tensor | None, flats: list[Tensor] | None) -> None:
        row = torch.empty(0, dtype=torch.float64) if row is None else row
        head = torch.zeros(_NUMBERS + self._short, dtype=torch.float64)
        head[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        head[_NUMBERS - 2], head[_NUMBERS - 1] = row.numel(), flats is not None
        is_short = row.numel() <= self._short
        if is_short:
            head[_NUMBERS : _NUMBERS + row.numel()] = row
        sent = [self._send(each, _NUMERIC) for each in ([head] if is_short else [head, row])]
        sent += [self._send(flat.cpu(), _TENSORS) for flat in flats or ()]
        for each in sent:
            each.wait()

    def receive(self) -> tuple[list[float], Tensor, list[Tensor]]:
        """Returns what the other rank has sent. The flat tensors are valid until the next call of `expect`."""
        head = torch.empty(_NUMBERS + self._short, dtype=torch.float64)
        self._receive(head, _NUMERIC).wait()
        *numbers, size, has_flats = head[:_NUMBERS].tolist()
        row = head[_NUMBERS : _NUMBERS + int(size)]
        if size > self._short:
            row = torch.empty(int(size), dtype=torch.float64)
            self._receive(row, _NUMERIC).wait()
        self.nbytes += head.nbytes + row.nbytes * (size > self._short)
        if has_flats:
            self.nbytes += sum(flat.nbytes for flat in self.room)
            for each in self._expected:
                each.wait()
        return numbers, row, self.room if has_flats else []

    def _send(self, tensor: Tensor, tag: int) -> dist.Work:
        self.nbytes += tensor.nbytes
        work = dist.isend(tensor, group=self._group, group_dst=self._peer, tag=tag)
        assert work is not None
        return work

    def _receive(self, tensor: Tensor, tag: int) -> dist.Work:
        work = dist.irecv(tensor, group=self._group, group_src=self._peer, tag=tag)
        assert work is not None
        return work


class RemoteLink(ServerLink):
    """The connection of a worker on another rank than the server's, which is the first of ``group``."""

    def __init__(self, group: dist.ProcessGroup, layout: FlatLayout) -> None:
        self._messages, self._worker = _Messages(group, 0, layout), dist.get_rank(group)

    def trade(self, pushed: Pushed | None, begin: int | None) -> Reply:
        number = _NONE if begin is None else begin
        self._messages.expect()
        if pushed is None:
            self._messages.send([_TRADE, number, _NONE], None, None)
        else:
            numbers = [_TRADE, number, pushed.number, pushed.terms, pushed.total]
            self._messages.send(numbers, pushed.row, pushed.gradients)
        (status, *lease), row, weights = self._messages.receive()
        if status == _BEGUN:
            return Reply(lease=self._lease(lease), row=row, weights=weights)
        return Reply(revoked=status == _REVOKED)

    def draw(self) -> Lease | None:
        self._messages.send([_DRAW], None, None)
        (status, *lease), _, _ = self._messages.receive()
        return self._lease(lease) if status == _BEGUN else None

    def _lease(self, numbers: list[float]) -> Lease:
        number, start, stop = map(int, numbers[:3])
        return Lease(number, self._worker, start, stop)


class Serving:
    """Serves the workers of other ranks while a section is open, each in a thread."""

    def __init__(self, server: ParameterServer, group: dist.ProcessGroup, layout: FlatLayout) -> None:
        self._server, self._device = server, layout.device
        workers = range(1, dist.get_world_size(group))
        self._messages = {worker: _Messages(group, worker, layout) for worker in workers}
        self._threads = [
            threading.Thread(target=self._serve, args=each, daemon=True) for each in self._messages.items()
        ]
        self.lost: dict[int, Exception] = {}
        """The workers whose connection has broken, with the error."""
        for thread in self._threads:
            thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes of all messages so far, in both directions."""
        return sum(each.nbytes for each in self._messages.values())

    def check(self) -> None:
        """Raises the error of the first worker that is lost, if one is."""
        for error in self.lost.values():
            raise error

    def join(self) -> None:
        """Waits until all workers know that the section is over, or are lost."""
        for thread in self._threads:
            thread.join()

    def _serve(self, worker: int, messages: _Messages) -> None:
        accelerators.set_current(self._device)
        try:
            while self._answer(worker, messages):
                pass
        except Exception as error:  # whatever it is, this worker is not served any more
            self.lost[worker] = error
            self._server.lose(worker)

    def _answer(self, worker: int, messages: _Messages) -> bool:
        """Answers a request. Returns False if the section is over for the worker."""
        (kind, begin, number, terms, total, *_), row, gradients = messages.receive()
        if kind == _DRAW:
            drawn = self._server.draw(worker)
            messages.send([_OVER if drawn is None else _BEGUN, *_numbers(drawn)], None, None)
            return True
        pushed = None if number == _NONE else Pushed(int(number), terms, total, row, gradients)
        reply = self._server.trade(worker, pushed, None if begin == _NONE else int(begin))
        if reply.lease is not None:
            messages.expect()  # the gradients of the lease
            messages.send([_BEGUN, *_numbers(reply.lease)], reply.row, reply.weights)
            return True
        messages.send([_REVOKED if reply.revoked else _OVER], None, messages.room)  # it expects tensors
        return reply.revoked


def _numbers(lease: Lease | None) -> list[float]:
    return [] if lease is None else [float(lease.number), float(lease.start), float(lease.stop)]
