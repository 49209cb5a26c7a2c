"""Reduce-scatter and all-gather with unequal ranges, through memory that the CPU ranks of one host share.

Each is one half of the all-reduce in :mod:`evener.collectives.shared_memory.all_reduce`. Both cut every range into the
same number of pieces, so that all ranks go through the same chunks of the ring however unequal the ranges are::

    summed      rank r, chunk c                                 says when done
                copy in    its terms of the others' pieces      entered[r] = c + 1
                add up     all terms of its own piece           left[r]    = c + 1

    gathered    copy own   its own piece                        entered[r] = c + 1
                copy out   the others' pieces                   left[r]    = c + 1

A caller may write its terms directly into a *room*, a buffer in shared memory. If all ranks did so, nothing is copied:
one chunk number stands for the whole call, and each rank adds up its range from the rooms::

    summed      rank r, chunk c    its room is filled                  entered[r] = c + 1, with the number of the room
                                   adds up its range of all rooms      left[r]    = c + 1
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from evener.collectives.reduce_scatter import Pending, RangeOwners
from evener.collectives.shared_memory.chunk_ring import SLOTS, Chunk, ChunkRing, check_carried, run
from evener.collectives.shared_memory.in_place import add_chunks
from evener.distributed.shm.segment import Segment
from evener.distributed.shm.slots import DTYPE_CODES, ENTERED, LEFT, map_segments, tag_of
from evener.errors import ConfigurationError

_SLOT_NBYTES = 1024 * 1024
_LINE = 64
ROOMS = 2
"""Number of rooms: one is filled while another is summed. If more are needed, as when gradients come in another order
than their buckets, the sum goes through slots."""
_MOST_ROOM_NBYTES = 64 * 2**20
"""The largest room, as rooms take memory permanently. Larger tensors, such as a bucket of a huge table, go through
slots."""
_NO_ROOM = 1


SHARED_NBYTES = SLOTS * _SLOT_NBYTES
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
        self._group, self._rank, self._degree = group, group.rank(), group.size()
        self._rooms: list[Segment] = []
        self._room_nbytes = 0
        self._free: dict[int, int] = {}
        self._lent: dict[int, tuple[int, weakref.ref[Tensor]]] = {}
        self._made: ChunkRing | None = ChunkRing(group, _SLOT_NBYTES, timeout_seconds, "exchange with owners")

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
        self._ring.slots.wait(LEFT, left)  # other ranks may still read the room's former content
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
        slots, chunk = self._ring.slots, self._ring.next_number()
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
        ring = self._ring
        pieces = self._pieces(flat, sizes, sum(sizes))
        chunks = [ring.chunk(each, _sizes(each), _starts(each)) for each in pieces]
        into = iter(own.tensor_split(len(chunks)) if chunks else ())

        def add_up(chunk: Chunk) -> None:
            ring.add_up(chunk, next(into), LEFT)

        run(chunks, ring.copy_in, add_up)

    def gather(self, flat: Tensor, sizes: Sequence[int]) -> None:
        ring = self._ring
        pieces, starts = self._pieces(flat, sizes, max(sizes)), (0,) * self._degree
        run([ring.chunk(each, _sizes(each), starts) for each in pieces], ring.copy_own, ring.copy_out)

    def close(self) -> None:
        self._made, self._rooms, self._room_nbytes = None, [], 0
        self._free.clear()

    @property
    def _ring(self) -> ChunkRing:
        if self._made is None:
            raise ConfigurationError("this exchange through shared memory has been closed")
        return self._made

    def _pieces(self, flat: Tensor, sizes: Sequence[int], at_once: int) -> list[list[Tensor]]:
        """Returns every rank's piece of each chunk of a call. ``at_once`` is the number of elements that a slot would
        need for one chunk."""
        check_carried(flat, "carries")
        if not flat.numel():
            return []
        # Each piece begins at a cache line; leave space for that.
        length = _SLOT_NBYTES // flat.element_size() - (_LINE + 1) * self._degree
        number = -(-at_once // length)
        ranges = [piece.tensor_split(number) for piece in flat.split_with_sizes(list(sizes))]
        self._ring.slots.count_call()
        return [[piece[index] for piece in ranges] for index in range(number)]


def rooms_nbytes(nbytes: int) -> int:
    """Returns the bytes of all rooms of a rank, if the largest tensor to be summed has ``nbytes``."""
    return ROOMS * min(nbytes, _MOST_ROOM_NBYTES)


def _sizes(pieces: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(piece.numel() for piece in pieces)


def _starts(pieces: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns the start of each piece in a slot that holds all pieces. Each piece starts at its own cache line."""
    lengths = [-(-piece.numel() // _LINE) * _LINE for piece in pieces]
    return tuple(accumulate(lengths[:-1], initial=0))
