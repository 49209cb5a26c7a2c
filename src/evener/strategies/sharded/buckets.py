"""Buckets of gradients in the order of their owners, filled while backward runs.

A bucket is one flat tensor, in which the rows of one owner lie together, whatever weights they are of::

    weights     a: rows 0 1 of rank 0, row 2 of rank 1      b: row 0 of rank 0, rows 1 2 of rank 1
    bucket      a0 a1 b0 + | a2 b1 b2 +
                rank 0       rank 1

At each ``+`` stands a number that is not finite if one of the sending rank's is not. Its sum tells all ranks alike,
before any of them goes on to an update in which it would wait for one that has stopped.

Backward fills them from the last weights to the first. A full bucket is sent at once, but never before those in front
of it, so that all ranks send the same in the same order, also where one of them skips a layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from evener.collectives.reduce_scatter import Pending
from evener.components import gradients
from evener.errors import ConfigurationError
from evener.hardware.async_read import Readout, is_late
from evener.hardware.memory import made_as
from evener.hardware.memory.counters import BUCKETS
from evener.hardware.timers import waiting
from evener.strategies.sharded.owned_weight import Weight

MOST_ON_THE_WAY = 2
"""Buckets that are being summed while another is filled: what is in memory beyond the sums."""


class Bucket:
    """Which rows of which weights lie where.

    Args:
        weights: Of one type on one device, dense.
        degree: How many ranks own rows.
        rank: This one among them.
    """

    def __init__(self, weights: Sequence[Weight], degree: int, rank: int) -> None:
        self.weights, self.rank = list(weights), rank
        self._shapes = [[weight.rows(weight.whole, of).shape for weight in weights] for of in range(degree)]
        self._lengths = [
            length for of_rank in self._shapes for length in (*map(torch.Size.numel, of_rank), 1)
        ]
        self.sizes = [sum(map(torch.Size.numel, of_rank)) + 1 for of_rank in self._shapes]
        """Elements of each rank."""

    @property
    def nbytes(self) -> int:
        """Of its memory."""
        return sum(self.sizes) * self.weights[0].whole.element_size()

    def room(self) -> Tensor:
        """Memory for the bucket."""
        with made_as(BUCKETS):
            return self.weights[0].whole.new_empty(sum(self.sizes))

    def views(self, flat: Tensor) -> list[tuple[Tensor, ...]]:
        """Of each rank, the rows of every weight in ``flat``, and behind them the number that tells of all."""
        pieces = iter(flat.split_with_sizes(self._lengths))
        return [tuple(next(pieces).view(shape) for shape in (*of_rank, ())) for of_rank in self._shapes]

    def own(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The rows of every weight in ``flat``, which has those of this rank alone, and the number behind them."""
        shapes = (*self._shapes[self.rank], torch.Size(()))
        pieces = flat.split_with_sizes([shape.numel() for shape in shapes])
        return tuple(piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))

    def copy_in(self, views: Sequence[Sequence[Tensor]], place: int, gradient: Tensor | None) -> None:
        """Lays the gradient of a weight, or zeros, into its places."""
        weight = self.weights[place]
        for rank, of_rank in enumerate(views):
            if gradient is None:
                of_rank[place].zero_()
            else:
                of_rank[place].copy_(weight.rows(gradient, rank))


def buckets_of(weights: Iterable[Weight], nbytes: int, degree: int, rank: int) -> list[Bucket]:
    """Weights of one type and device together, until these reach ``nbytes``; from the last to the first."""
    found: list[list[Weight]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[Weight]] = {}
    for weight in reversed(list(weights)):
        key = weight.whole.dtype, weight.whole.device
        if key not in filling:
            found.append(filling.setdefault(key, []))
        filling[key].append(weight)
        if sum(each.whole.nbytes for each in filling[key]) >= nbytes:
            del filling[key]
    return [Bucket(held, degree, rank) for held in found]


Look = Callable[[Tensor, gradients.Named, float | None], Readout]
"""Looks at one flat tensor of gradients, and says a number that is finite if all of it is; that of the host, if it is
known."""


class Filling:
    """A bucket while backward fills it, in the memory of ``flat``."""

    def __init__(self, bucket: Bucket, flat: Tensor) -> None:
        self.flat = flat
        self._bucket, self._views = bucket, bucket.views(self.flat)
        self._filled: set[int] = set()
        # Asked of each gradient as it comes, which is in the processor's cache then.
        self._number = None if is_late(flat.device) else 0.0

    @property
    def is_full(self) -> bool:
        """Whether a gradient of every weight has come."""
        return len(self._filled) == len(self._bucket.weights)

    def take(self, place: int) -> bool:
        """Moves the gradient of a weight here, or zeros where there is none; whether there was one."""
        weight = self._bucket.weights[place]
        gradient, weight.whole.grad = weight.whole.grad, None
        if self._number is not None and gradient is not None:
            self._number += gradients.number_of(gradient)
        self._bucket.copy_in(self._views, place, gradient)
        self._filled.add(place)
        return gradient is not None

    def tell(self, total: Tensor | None, look: Look) -> Readout:
        """Marks the bucket if a number in it, or the total of the terms, is not finite; what ``look`` says of it."""
        for of_rank in self._views:
            of_rank[-1].zero_()
        found = look(self.flat, self._named, self._number)
        doubt = found.tensor * 0 if total is None else found.tensor * 0 + total * 0
        for of_rank in self._views:
            of_rank[-1].copy_(doubt)
        return found

    def _named(self) -> list[tuple[str, Tensor]]:
        """Of each weight the rows of all ranks."""
        names = [weight.name for weight in self._bucket.weights]
        return [each for of_rank in self._views for each in zip(names, of_rank[:-1], strict=True)]

    def has(self, place: int) -> bool:
        """Whether a gradient of that weight has come."""
        return place in self._filled

    def lacking(self) -> Iterator[int]:
        """The places of the weights of which no gradient has come."""
        return (place for place in range(len(self._bucket.weights)) if not self.has(place))


Start = Callable[[Bucket, Tensor], Pending]
"""Starts to sum a bucket over the ranks; gives this rank's rows of the sum."""


class Round:
    """Sums all buckets once, or a few times, adding up.

    Args:
        start: Sums one.
        last_one: Called before the last bucket is sent.
        look: Called with what this rank adds, before it is lost in the sum of all.
        room: Gives memory for a bucket that is to be summed.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        start: Start,
        last_one: Callable[[], None],
        look: Look,
        room: Callable[[Bucket], Tensor] = Bucket.room,
    ) -> None:
        self._room = room
        self.buckets, self._start, self._last_one, self._look = buckets, start, last_one, look
        self._places = {
            weight: (number, place)
            for number, bucket in enumerate(buckets)
            for place, weight in enumerate(bucket.weights)
        }
        self.sums: dict[int, Tensor] = {}
        """Of each bucket this rank's rows."""
        self.given: set[Weight] = set()
        """Weights to which this rank gave a gradient."""
        self.soundness: list[Readout] = []
        self.total: Tensor | None = None
        """Of the terms from which the gradients come, if known."""
        self._begin()

    def _begin(self) -> None:
        self._open: dict[int, Filling] = {}
        self._sent = 0
        self._on_the_way: deque[tuple[int, Pending]] = deque()

    def forget(self) -> None:
        """A new sum begins."""
        self.sums, self.given, self.soundness = {}, set(), []
        self._begin()

    def arrived(self, weight: Weight) -> None:
        """The gradient of ``weight`` is complete; sends the buckets that are full.

        Raises:
            ConfigurationError: If it has been sent already.
        """
        number, place = self._places[weight]
        if number < self._sent or self._filling(number).has(place):
            raise ConfigurationError(
                f"the gradient of {weight.name} came twice in one backward, as with activation checkpointing that is "
                "reentrant; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        self._take(self._filling(number), number, place)
        while self._sent in self._open and self._open[self._sent].is_full:
            self._send()

    def finish(self) -> None:
        """Sends what is left, and waits for all sums."""
        while self._sent < len(self.buckets):
            self._send()
        while self._on_the_way:
            self._add_one()
        self._begin()

    def _filling(self, number: int) -> Filling:
        if number not in self._open:
            self._open[number] = Filling(self.buckets[number], self._room(self.buckets[number]))
        return self._open[number]

    def _take(self, filling: Filling, number: int, place: int) -> None:
        if filling.take(place):
            self.given.add(self.buckets[number].weights[place])

    def _send(self) -> None:
        number = self._sent
        filling = self._filling(number)
        for place in list(filling.lacking()):
            self._take(filling, number, place)
        del self._open[number]
        self.soundness.append(filling.tell(self.total, self._look))
        self._sent += 1
        if self._sent == len(self.buckets):
            self._last_one()
        with waiting():
            self._on_the_way.append((number, self._start(self.buckets[number], filling.flat)))
        if len(self._on_the_way) > MOST_ON_THE_WAY:
            self._add_one()

    def _add_one(self) -> None:
        number, pending = self._on_the_way.popleft()
        with waiting():
            own = pending()
        self.sums[number] = self.sums[number].add_(own) if number in self.sums else own
