"""The connection of a worker with the parameter server: by calls on the server's rank, by messages elsewhere.

Messages go through a gloo group of their own, from and to host memory, so that a rank on a GPU needs no stream for
them. For each worker of another rank a thread of the server's rank waits for requests, and answers them::

    rank 1    request: 8 numbers ─ row ─ gradients ──▶ thread of rank 1 on rank 0 ──▶ server.trade
              reply:   8 numbers ─ row ─ weights   ◀──

If a connection breaks, the server takes back what the worker had leased, and the others go on.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from evener.strategies.asynchronous.flat_parameters import FlatLayout
from evener.strategies.asynchronous.ledger import Lease
from evener.strategies.asynchronous.server import ParameterServer, Pushed, Reply

_NUMBERS = 8
_TRADE, _DRAW = 0.0, 1.0
_BEGUN, _REVOKED, _OVER = 0.0, 1.0, 2.0
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
        self._room = layout.empty("cpu")

    def send(self, numbers: list[float], row: Tensor | None, flats: list[Tensor] | None) -> None:
        size = 0 if row is None else row.numel()
        padded = [*numbers, *[0.0] * (_NUMBERS - 2 - len(numbers)), float(size), float(flats is not None)]
        self._send(torch.tensor(padded, dtype=torch.float64))
        if row is not None and size:
            self._send(row)
        for flat in flats or ():
            self._send(flat.cpu())

    def receive(self) -> tuple[list[float], Tensor, list[Tensor]]:
        """Returns what the other rank has sent. The flat tensors are valid until the next call."""
        header = torch.empty(_NUMBERS, dtype=torch.float64)
        self._receive(header)
        *numbers, size, has_flats = header.tolist()
        row = torch.empty(int(size), dtype=torch.float64)
        if size:
            self._receive(row)
        flats = self._room if has_flats else []
        for flat in flats:
            self._receive(flat)
        return numbers, row, flats

    def _send(self, tensor: Tensor) -> None:
        dist.send(tensor, group=self._group, group_dst=self._peer)

    def _receive(self, tensor: Tensor) -> None:
        dist.recv(tensor, group=self._group, group_src=self._peer)


class RemoteLink(ServerLink):
    """The connection of a worker on another rank than the server's, which is the first of ``group``."""

    def __init__(self, group: dist.ProcessGroup, layout: FlatLayout) -> None:
        self._messages, self._worker = _Messages(group, 0, layout), dist.get_rank(group)

    def trade(self, pushed: Pushed | None, begin: int | None) -> Reply:
        number = _NONE if begin is None else begin
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
        self._server = server
        workers = range(1, dist.get_world_size(group))
        self._threads = [
            threading.Thread(target=self._serve, args=(worker, _Messages(group, worker, layout)), daemon=True)
            for worker in workers
        ]
        self.lost: dict[int, Exception] = {}
        """The workers whose connection has broken, with the error."""
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raises the error of the first worker that is lost, if one is."""
        for error in self.lost.values():
            raise error

    def join(self) -> None:
        """Waits until all workers know that the section is over, or are lost."""
        for thread in self._threads:
            thread.join()

    def _serve(self, worker: int, messages: _Messages) -> None:
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
            messages.send([_BEGUN, *_numbers(reply.lease)], reply.row, reply.weights)
            return True
        messages.send([_REVOKED if reply.revoked else _OVER], None, None)
        return reply.revoked


def _numbers(lease: Lease | None) -> list[float]:
    return [] if lease is None else [float(lease.number), float(lease.start), float(lease.stop)]
