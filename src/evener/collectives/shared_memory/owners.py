"""Sums to owners, and ranges from them, through the memory that the CPU ranks of one host share.

As the all-reduce beside it (:mod:`evener.collectives.shared_memory.all_reduce`), of which each is one half. Both cut
every range into equally many pieces, so that all ranks go through the same chunks however unequal the ranges are::

    summed      rank r, chunk c                                 says when done
                copy in    its terms of the others' pieces      entered[r] = c + 1
                add up     all terms of its own piece           left[r]    = c + 1

    gathered    copy in    its own piece                        entered[r] = c + 1
                copy out   the others' pieces                   left[r]    = c + 1

While a rank works on one chunk, the next one lies in its slots already, so that few wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from evener.collectives.owners import Owners, Pending
from evener.collectives.shared_memory.in_place import add_terms
from evener.errors import ConfigurationError
from evener.runtime.slots import DTYPE_CODES, ENTERED, LEFT, Slots

_SLOTS = 4
_SLOT_NBYTES = 1024 * 1024
_LINE = 64


class _Chunk(NamedTuple):
    number: int
    pieces: list[Tensor]
    """Of every rank's range, in this rank's memory."""


SHARED_NBYTES = _SLOTS * _SLOT_NBYTES
"""Bytes of shared memory that each rank makes."""


class SharedOwners(Owners):
    """Through shared memory; sum and ranges are there when a call returns.

    Args:
        group: Ranks of one host.
        timeout_seconds: How long to wait for a rank.

    Raises:
        ConfigurationError: The ranks do not share a host, or the machine cannot do it; on every rank alike.
    """

    words = "shared-memory"

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        self._rank, self._degree, self._count = group.rank(), group.size(), 0
        self._slots: Slots | None = Slots(
            group, _SLOTS, _SLOT_NBYTES, timeout_seconds, "exchange with owners"
        )

    def summed(self, flat: Tensor, sizes: Sequence[int]) -> Pending:
        own = flat.new_empty(sizes[self._rank])
        chunks = self._begun(flat, sizes, sum(sizes))
        into = own.tensor_split(len(chunks)) if chunks else []
        for turn in range(len(chunks) + 1):
            if turn < len(chunks):
                self._give_terms(chunks[turn])
            if turn:
                self._add_up(chunks[turn - 1], into[turn - 1])
        return lambda: own

    def gather(self, flat: Tensor, sizes: Sequence[int]) -> None:
        chunks = self._begun(flat, sizes, max(sizes))
        for turn in range(len(chunks) + 1):
            if turn < len(chunks):
                self._give_own(chunks[turn])
            if turn:
                self._take_others(chunks[turn - 1])

    def close(self) -> None:
        self._slots = None

    @property
    def _room(self) -> Slots:
        if self._slots is None:
            raise ConfigurationError("this exchange through shared memory has been closed")
        return self._slots

    def _begun(self, flat: Tensor, sizes: Sequence[int], at_once: int) -> list[_Chunk]:
        """The chunks of a call, such that ``at_once`` elements go through a slot."""
        if flat.dtype not in DTYPE_CODES or flat.device.type != "cpu":
            raise ConfigurationError(
                f"shared memory carries CPU tensors of the dtypes that torch adds, not {flat.dtype} on {flat.device}; "
                "'native' carries what the backend can"
            )
        if not flat.numel():
            return []
        # Each piece begins on a cache line, for which room is left.
        length = _SLOT_NBYTES // flat.element_size() - (_LINE + 1) * self._degree
        number = -(-at_once // length)
        ranges = [piece.tensor_split(number) for piece in flat.split_with_sizes(list(sizes))]
        first, self._count = self._count, self._count + number
        self._room.count_call()
        return [_Chunk(first + turn, [piece[turn] for piece in ranges]) for turn in range(number)]

    def _give_terms(self, chunk: _Chunk) -> None:
        self._room.wait(LEFT, chunk.number - _SLOTS + 1)
        for rank, start in enumerate(_starts(chunk.pieces)):
            if rank != self._rank:
                self._view(self._rank, chunk, start, chunk.pieces[rank]).copy_(chunk.pieces[rank])
        self._room.publish(ENTERED, chunk.number + 1)

    def _add_up(self, chunk: _Chunk, out: Tensor) -> None:
        mine, start = chunk.pieces[self._rank], _starts(chunk.pieces)[self._rank]
        self._room.wait(ENTERED, chunk.number + 1)
        terms = [
            mine if rank == self._rank else self._view(rank, chunk, start, mine)
            for rank in range(self._degree)
        ]
        add_terms(terms, out)
        self._room.publish(LEFT, chunk.number + 1)

    def _give_own(self, chunk: _Chunk) -> None:
        mine = chunk.pieces[self._rank]
        self._room.wait(LEFT, chunk.number - _SLOTS + 1)
        self._view(self._rank, chunk, 0, mine).copy_(mine)
        self._room.publish(ENTERED, chunk.number + 1)

    def _take_others(self, chunk: _Chunk) -> None:
        self._room.wait(ENTERED, chunk.number + 1)
        for rank, piece in enumerate(chunk.pieces):
            if rank != self._rank:
                piece.copy_(self._view(rank, chunk, 0, piece))
        self._room.publish(LEFT, chunk.number + 1)

    def _view(self, rank: int, chunk: _Chunk, start: int, like: Tensor) -> Tensor:
        return self._room.view(rank, chunk.number % _SLOTS, like.dtype, start, like.numel())


def _starts(pieces: Sequence[Tensor]) -> list[int]:
    """Where each piece begins in a slot that holds all of them, so that no two ranks write to one line."""
    lengths = [-(-piece.numel() // _LINE) * _LINE for piece in pieces]
    return list(accumulate(lengths[:-1], initial=0))
