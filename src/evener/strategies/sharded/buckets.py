"""Buckets of gradients, ordered by the owners of the rows and filled while backward runs.

A bucket is one flat tensor. The rows of one owner lie together in it, whichever weights they belong to::

    weights     a: rows 0 1 of rank 0, row 2 of rank 1      b: row 0 of rank 0, rows 1 2 of rank 1
    bucket      a0 a1 b0 + | a2 b1 b2 +
                rank 0       rank 1

Each ``+`` is a flag: a number that is not finite if one of the sending rank's gradients is not finite. Its sum tells
all ranks the same, before any of them begins an update in which it would wait for a rank that has stopped. In a run
that is exact in bits, a bucket has float64 numbers, and behind each flag the counts of all its weights
(:mod:`evener.components.exact_sum`).

Backward fills the buckets from the last weights to the first. A full bucket is sent at once, but never before those in
front of it, so that all ranks send in the same order, also if one of them skips a layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from evener.collectives.reduce_scatter import Pending
from evener.components import gradients
from evener.components.exact_sum.gradients import ExactGradients
from evener.errors import ConfigurationError
from evener.hardware.async_read import Readout, is_late
from evener.hardware.memory import made_as
from evener.hardware.memory.counters import BUCKETS
from evener.hardware.profile_ranges import named_range
from evener.hardware.timers import waiting
from evener.strategies.sharded.owned_weight import Weight

MOST_ON_THE_WAY = 2
"""Number of buckets that may be in the middle of a sum while another is filled. These take memory besides the sums."""


class Bucket:
    """Layout of a bucket: which rows of which weights lie where.

    Args:
        weights: Dense weights of one dtype on one device.
        degree: Number of ranks that own rows.
        rank: Index of this rank among them.
        counted: Whether the sum is to be exact in bits.
    """

    def __init__(self, weights: Sequence[Weight], degree: int, rank: int, counted: bool = False) -> None:
        self.weights, self.rank = list(weights), rank
        whole = weights[0].whole
        self.like = whole.new_empty(0, dtype=torch.float64 if counted else whole.dtype)
        """An empty tensor of the type and on the device of the flat tensor."""
        tail = torch.Size([1 + len(weights) if counted else 1])
        self._shapes = [
            (*(weight.rows(weight.whole, of).shape for weight in weights), tail) for of in range(degree)
        ]
        self._lengths = [shape.numel() for of_rank in self._shapes for shape in of_rank]
        self.sizes = [sum(map(torch.Size.numel, of_rank)) for of_rank in self._shapes]
        """Number of elements of each rank, including its flag and counts."""

    @property
    def nbytes(self) -> int:
        """Bytes of the bucket's flat tensor."""
        return sum(self.sizes) * self.like.element_size()

    def room(self) -> Tensor:
        """Allocates the flat tensor of the bucket."""
        with made_as(BUCKETS):
            return self.like.new_empty(sum(self.sizes))

    def views(self, flat: Tensor) -> list[tuple[Tensor, ...]]:
        """Returns for each rank the views of its rows of every weight in ``flat``, followed by that of flag and
        counts."""
        pieces = iter(flat.split_with_sizes(self._lengths))
        return [tuple(next(pieces).view(shape) for shape in of_rank) for of_rank in self._shapes]

    def own_rows(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Returns views of this rank's rows of every weight, then of flag and counts, in ``flat``, which holds only
        these."""
        shapes = self._shapes[self.rank]
        pieces = flat.split_with_sizes([shape.numel() for shape in shapes])
        return tuple(piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))

    def copy_in(self, views: Sequence[Sequence[Tensor]], place: int, gradient: Tensor | None) -> None:
        """Copies the gradient of weight number ``place`` into the views; zeros if ``gradient`` is None."""
        weight = self.weights[place]
        for rank, of_rank in enumerate(views):
            if gradient is None:
                of_rank[place].zero_()
            else:
                of_rank[place].copy_(weight.rows(gradient, rank))


def buckets_of(
    weights: Iterable[Weight], nbytes: int, degree: int, rank: int, counted: bool = False
) -> list[Bucket]:
    """Groups weights of one dtype and device, from the last to the first, until a group reaches ``nbytes``."""
    found: list[list[Weight]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[Weight]] = {}
    for weight in reversed(list(weights)):
        key = weight.whole.dtype, weight.whole.device
        if key not in filling:
            found.append(filling.setdefault(key, []))
        filling[key].append(weight)
        if sum(each.whole.nbytes for each in filling[key]) >= nbytes:
            del filling[key]
    return [Bucket(held, degree, rank, counted) for held in found]


Look = Callable[[Tensor, gradients.Named, float | None], Readout]
"""Checks one flat tensor of gradients. Takes the tensor, the named gradients in it, and the check number of the host if
it is known. Returns a number that is finite if all gradients are."""


class Filling:
    """A bucket while backward fills it. Its memory is ``flat``.

    Args:
        exact: Adds up the gradients of all blocks, if the sum is to be exact in bits.
    """

    def __init__(self, bucket: Bucket, flat: Tensor, exact: ExactGradients | None = None) -> None:
        self.flat = flat
        self._bucket, self._views, self._exact = bucket, bucket.views(self.flat), exact
        self._filled: set[int] = set()
        self._last_block: dict[str, Tensor] = {}
        # On a CPU each gradient is checked when it comes, while it is in the processor's cache.
        self._number = None if is_late(flat.device) or exact is not None else 0.0

    @property
    def is_full(self) -> bool:
        """True if a gradient of every weight has come."""
        return len(self._filled) == len(self._bucket.weights)

    def take_gradient(self, place: int) -> bool:
        """Moves the gradient of a weight into the bucket, or zeros if it has none. Returns True if it had one."""
        weight = self._bucket.weights[place]
        gradient, weight.whole.grad = weight.whole.grad, None
        if self._number is not None and gradient is not None:
            self._number += gradients.number_of(gradient)
        if self._exact is None:
            self._bucket.copy_in(self._views, place, gradient)
        elif gradient is not None:
            self._last_block[weight.name] = gradient
        self._filled.add(place)
        return gradient is not None

    def tell(self, total: Tensor | None, look: Look) -> Readout:
        """Sets the flags, which are not finite if a gradient or ``total`` is not. Returns the result of ``look``."""
        for of_rank in self._views:
            of_rank[-1].zero_()
        if self._exact is not None:
            self._take_sums(self._exact)
        found = look(self.flat, self._named, self._number)
        doubt = found.tensor * 0 if total is None else found.tensor * 0 + total * 0
        for of_rank in self._views:
            of_rank[-1][:1].copy_(doubt)
        return found

    @torch.no_grad()
    def _take_sums(self, exact: ExactGradients) -> None:
        """Copies the sums of all blocks of this rank into the bucket, with their counts."""
        exact.add(self._last_block)
        self._last_block.clear()
        names = [weight.name for weight in self._bucket.weights]
        for place, name in enumerate(names):
            self._bucket.copy_in(self._views, place, exact.local(name))
        for of_rank in self._views:
            of_rank[-1][1:].copy_(exact.counts(names))

    def _named(self) -> list[tuple[str, Tensor]]:
        """Returns pairs of a weight's name and a rank's rows of it, for all ranks."""
        names = [weight.name for weight in self._bucket.weights]
        return [each for of_rank in self._views for each in zip(names, of_rank[:-1], strict=True)]

    def has(self, place: int) -> bool:
        """Returns True if a gradient of weight number ``place`` has come."""
        return place in self._filled

    def lacking(self) -> Iterator[int]:
        """Yields the numbers of the weights of which no gradient has come."""
        return (place for place in range(len(self._bucket.weights)) if not self.has(place))


Start = Callable[[Bucket, Tensor], Pending]
"""Starts to sum a bucket over the ranks. The returned call waits and gives this rank's rows of the sum."""


class BucketRound:
    """Sums all buckets, once or for several micro-batches, whose sums it adds up.

    Args:
        start: Starts the sum of one bucket.
        last_one: Called before the last bucket is sent.
        look: Called with the gradients of this rank, before they are summed with those of others.
        room: Allocates memory for a bucket that is to be summed.
        exact: Adds up the gradients of all blocks, if the sum is to be exact in bits.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        start: Start,
        last_one: Callable[[], None],
        look: Look,
        room: Callable[[Bucket], Tensor] = Bucket.room,
        exact: ExactGradients | None = None,
    ) -> None:
        self._room, self._exact = room, exact
        self.buckets, self._start, self._last_one, self._look = buckets, start, last_one, look
        self._places = {
            weight: (number, place)
            for number, bucket in enumerate(buckets)
            for place, weight in enumerate(bucket.weights)
        }
        self.sums: dict[int, Tensor] = {}
        """For each bucket, by number, this rank's rows of the sum."""
        self.given: set[Weight] = set()
        """Weights to which this rank gave a gradient."""
        self.soundness: list[Readout] = []
        self.total: Tensor | None = None
        """Summed loss terms of the micro-batch from which the gradients come; None if it is not known."""
        self._begin()

    def _begin(self) -> None:
        self._open: dict[int, Filling] = {}
        self._sent = 0
        self._on_the_way: deque[tuple[int, Pending]] = deque()

    def forget(self) -> None:
        """Discards all sums, to begin a new one."""
        self.sums, self.given, self.soundness = {}, set(), []
        self._begin()

    def arrived(self, weight: Weight) -> None:
        """Takes the complete gradient of ``weight``, and sends the buckets that are full.

        Raises:
            ConfigurationError: If the gradient has already come.
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
        """Sends the remaining buckets, and waits for all sums."""
        while self._sent < len(self.buckets):
            self._send()
        while self._on_the_way:
            self._add_one()
        self._begin()

    def _filling(self, number: int) -> Filling:
        if number not in self._open:
            self._open[number] = Filling(self.buckets[number], self._room(self.buckets[number]), self._exact)
        return self._open[number]

    def _take(self, filling: Filling, number: int, place: int) -> None:
        if filling.take_gradient(place):
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
        with waiting(), named_range("reduce_scatter bucket", number):
            self._on_the_way.append((number, self._start(self.buckets[number], filling.flat)))
        if len(self._on_the_way) > MOST_ON_THE_WAY:
            self._add_one()

    def _add_one(self) -> None:
        number, pending = self._on_the_way.popleft()
        with waiting(), named_range("end of reduce_scatter bucket", number):
            own = pending()
        self.sums[number] = self.sums[number].add_(own) if number in self.sums else own
