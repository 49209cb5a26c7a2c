"""Reduce-scatter and all-gather with unequal ranges, through memory that the CPU ranks of one host share.

Each is one half of the all-reduce in :mod:`evener.collectives.shared_memory.all_reduce`. Both cut every range into the
same number of pieces, so that all ranks go through the same chunks however unequal the ranges are::

    summed      rank r, chunk c                                 says when done
                copy in    its terms of the others' pieces      entered[r] = c + 1
                add up     all terms of its own piece           left[r]    = c + 1

    gathered    copy in    its own piece                        entered[r] = c + 1
                copy out   the others' pieces                   left[r]    = c + 1

A rank copies the next chunk into its slots before it works on the current one, so that ranks seldom wait for each
other.

A caller may write its terms directly into a *room*, a buffer in shared memory. If all ranks did so, nothing is copied:
one chunk number stands for the whole call, and each rank adds up its range from the rooms::

    summed      rank r, chunk c    its room is filled                  entered[r] = c + 1, with the number of the room
                                   adds up its range of all rooms      left[r]    = c + 1
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from evener.collectives.reduce_scatter import Pending, RangeOwners
from evener.collectives.shared_memory.in_place import add_chunks, add_terms
from evener.distributed.shm.segment import Segment
from evener.distributed.shm.slots import DTYPE_CODES, ENTERED, LEFT, Slots, map_segments, tag_of
from evener.errors import ConfigurationError

_SLOTS = 4
_SLOT_NBYTES = 1024 * 1024
_LINE = 64
ROOMS = 2
"""Number of rooms: one is filled while another is summed. If more are needed, as when gradients come in another order
than their buckets, the sum goes through slots."""
_MOST_ROOM_NBYTES = 64 * 2**20
"""The largest room, as rooms take memory permanently. Larger tensors, such as a bucket of a huge table, go through
slots."""
_NO_ROOM = 1


class _Chunk(NamedTuple):
    number: int
    pieces: list[Tensor]
    """This chunk's piece of every rank's range, in this rank's tensor."""


SHARED_NBYTES = _SLOTS * _SLOT_NBYTES
"""Bytes of shared memory that each rank allocates for its slots."""


class SharedOwners(RangeOwners):
    """Uses shared memory. The result is there when a call returns.

    Args:
        group: Ranks of one host.
        timeout_seconds: The longest wait for a rank.

    Raises:
        ConfigurationError: The ranks do not share a host, or the machine does not support it; on every rank alike.
    """

    words = "shared-memory"

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        self._group, self._rank, self._degree, self._count = group, group.rank(), group.size(), 0
        self._rooms: list[Segment] = []
        self._room_nbytes = 0
        self._free: dict[int, int] = {}
        self._lent: dict[int, tuple[int, weakref.ref[Tensor]]] = {}
        self._slots: Slots | None = Slots(
            group, _SLOTS, _SLOT_NBYTES, timeout_seconds, "exchange with owners"
        )

    def prepare(self, nbytes: int) -> None:
        try:
            self._rooms = map_segments(self._group, rooms_nbytes(nbytes), "sums to owners")
        except ConfigurationError:  # raised on every rank alike
            return
        self._room_nbytes, self._free = rooms_nbytes(nbytes) // ROOMS, dict.fromkeys(range(ROOMS), 0)

    def room(self, like: Tensor, count: int) -> Tensor:
        if like.device.type != "cpu" or like.dtype not in DTYPE_CODES or not self._fits(like, count):
            return like.new_empty(count)
        number, left = self._free.popitem()
        self._slots_in_use.wait(LEFT, left)  # other ranks may still read the room's former content
        flat = self._in_room(self._rank, number, like.dtype, 0, count)
        self._lent[flat.data_ptr()] = number, weakref.ref(flat)
        return flat

    def _fits(self, like: Tensor, count: int) -> bool:
        if not self._free:
            self._take_back()
        return bool(self._free) and count * like.element_size() <= self._room_nbytes

    def _take_back(self) -> None:
        """Frees the rooms of tensors that were deleted without being summed, as after a step that raised or is
        repeated."""
        for place in [place for place, (_, flat) in self._lent.items() if flat() is None]:
            self._free[self._lent.pop(place)[0]] = 0

    def summed(self, flat: Tensor, sizes: Sequence[int]) -> Pending:
        own = flat.new_empty(sizes[self._rank])
        if not (self._room_nbytes and flat.numel() and self._summed_in_rooms(flat, sizes, own)):
            self._summed_through_slots(flat, sizes, own)
        return lambda: own

    def _summed_in_rooms(self, flat: Tensor, sizes: Sequence[int], own: Tensor) -> bool:
        """Sums from the rooms, if the tensors of all ranks lie in rooms. Returns True if so."""
        slots, chunk = self._slots_in_use, self._count
        self._count += 1
        lent, _ = self._lent.pop(flat.data_ptr(), (None, None))
        tag = tag_of(flat, _NO_ROOM if lent is None else _NO_ROOM + 1 + lent)
        slots.begin(chunk, tag)
        slots.publish(ENTERED, chunk + 1)
        slots.wait(ENTERED, chunk + 1)
        rooms = [said - _NO_ROOM - 1 for said in slots.extras(chunk, tag)]
        everywhere = min(rooms) >= 0
        if everywhere:
            start = sum(sizes[: self._rank])
            add_chunks(
                [self._in_room(rank, room, flat.dtype, start, len(own)) for rank, room in enumerate(rooms)],
                own,
            )
        slots.publish(LEFT, chunk + 1)
        if lent is not None:
            self._free[lent] = chunk + 1
        return everywhere

    def _in_room(self, rank: int, room: int, dtype: torch.dtype, start: int, count: int) -> Tensor:
        return self._rooms[rank].view(dtype, room * self._room_nbytes + start * dtype.itemsize, count)

    def _summed_through_slots(self, flat: Tensor, sizes: Sequence[int], own: Tensor) -> None:
        chunks = self._begun(flat, sizes, sum(sizes))
        into = own.tensor_split(len(chunks)) if chunks else []
        for turn in range(len(chunks) + 1):
            if turn < len(chunks):
                self._give_terms(chunks[turn])
            if turn:
                self._add_up(chunks[turn - 1], into[turn - 1])

    def gather(self, flat: Tensor, sizes: Sequence[int]) -> None:
        chunks = self._begun(flat, sizes, max(sizes))
        for turn in range(len(chunks) + 1):
            if turn < len(chunks):
                self._give_own(chunks[turn])
            if turn:
                self._take_others(chunks[turn - 1])

    def close(self) -> None:
        self._slots, self._rooms, self._room_nbytes = None, [], 0
        self._free.clear()

    @property
    def _slots_in_use(self) -> Slots:
        if self._slots is None:
            raise ConfigurationError("this exchange through shared memory has been closed")
        return self._slots

    def _begun(self, flat: Tensor, sizes: Sequence[int], at_once: int) -> list[_Chunk]:
        """Returns the chunks of a call. ``at_once`` is the number of elements that a slot would need for one chunk."""
        if flat.dtype not in DTYPE_CODES or flat.device.type != "cpu":
            raise ConfigurationError(
                f"shared memory carries CPU tensors of the dtypes that torch adds, not {flat.dtype} on {flat.device}; "
                "'native' carries what the backend can"
            )
        if not flat.numel():
            return []
        # Each piece begins at a cache line; leave space for that.
        length = _SLOT_NBYTES // flat.element_size() - (_LINE + 1) * self._degree
        number = -(-at_once // length)
        ranges = [piece.tensor_split(number) for piece in flat.split_with_sizes(list(sizes))]
        first, self._count = self._count, self._count + number
        self._slots_in_use.count_call()
        return [_Chunk(first + turn, [piece[turn] for piece in ranges]) for turn in range(number)]

    def _give_terms(self, chunk: _Chunk) -> None:
        self._slots_in_use.wait(LEFT, chunk.number - _SLOTS + 1)
        for rank, start in enumerate(_starts(chunk.pieces)):
            if rank != self._rank:
                self._view(self._rank, chunk, start, chunk.pieces[rank]).copy_(chunk.pieces[rank])
        self._slots_in_use.publish(ENTERED, chunk.number + 1)

    def _add_up(self, chunk: _Chunk, out: Tensor) -> None:
        mine, start = chunk.pieces[self._rank], _starts(chunk.pieces)[self._rank]
        self._slots_in_use.wait(ENTERED, chunk.number + 1)
        terms = [
            mine if rank == self._rank else self._view(rank, chunk, start, mine)
            for rank in range(self._degree)
        ]
        add_terms(terms, out)
        self._slots_in_use.publish(LEFT, chunk.number + 1)

    def _give_own(self, chunk: _Chunk) -> None:
        mine = chunk.pieces[self._rank]
        self._slots_in_use.wait(LEFT, chunk.number - _SLOTS + 1)
        self._view(self._rank, chunk, 0, mine).copy_(mine)
        self._slots_in_use.publish(ENTERED, chunk.number + 1)

    def _take_others(self, chunk: _Chunk) -> None:
        self._slots_in_use.wait(ENTERED, chunk.number + 1)
        for rank, piece in enumerate(chunk.pieces):
            if rank != self._rank:
                piece.copy_(self._view(rank, chunk, 0, piece))
        self._slots_in_use.publish(LEFT, chunk.number + 1)

    def _view(self, rank: int, chunk: _Chunk, start: int, like: Tensor) -> Tensor:
        return self._slots_in_use.view(rank, chunk.number % _SLOTS, like.dtype, start, like.numel())


def rooms_nbytes(nbytes: int) -> int:
    """Returns the bytes of all rooms of a rank, if the largest tensor to be summed has ``nbytes``."""
    return ROOMS * min(nbytes, _MOST_ROOM_NBYTES)


def _starts(pieces: Sequence[Tensor]) -> list[int]:
    """Returns the start of each piece in a slot that holds all pieces. Each piece starts at its own cache line."""
    lengths = [-(-piece.numel() // _LINE) * _LINE for piece in pieces]
    return list(accumulate(lengths[:-1], initial=0))
