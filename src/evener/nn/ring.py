"""Ring attention: keys and values travel from rank to rank, queries stay (Liu et al., "Ring Attention with Blockwise
Transformers for Near-Infinite Context", 2023).

::

              rank 0   rank 1   rank 2
    hop 0     k0 v0    k1 v1    k2 v2        each rank attends to the keys that it has at hand, while
    hop 1     k2 v2    k0 v0    k1 v1        those of the next hop are already on their way
    hop 2     k1 v1    k2 v2    k0 v0

Keys arrive tile by tile. So an online softmax keeps, for every query, the largest score so far and the sum of
exponentials relative to it (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). In backward,
keys and values go around once more. The weights of each tile are recomputed from the saved logarithm of that sum (Dao,
"FlashAttention-2", 2023, algorithm 2). Gradients of keys and values travel with them until they reach their owner. So a
rank holds its own piece, one travelling piece, and one tile of scores. Tiles that a causal mask hides entirely are
skipped.

Gradients that are to be differentiated again are those of :mod:`evener.nn.ulysses`, which computes the same by
operations that autograd knows. It needs at least as many heads of keys as ranks, and holds whole rows of scores.

Sums are kept in float32, or in float64 for float64 inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from evener.nn.collectives_no_grad import shifting
from evener.nn.second_derivatives import differentiable_gradients
from evener.nn.sequence_layout import DividedSequence
from evener.nn.ulysses import ulysses_attention

_TILE = 1024
"""The maximum number of queries, and of keys, in a tile: the scores of one tile are held at once."""
_KEYS, _GRADIENTS = 0, 1
"""Tags of the two kinds of messages; one of each kind may be under way at a time."""


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    sequence: DividedSequence,
) -> Tensor:
    """Computes the attention of this rank's queries to the keys of all ranks. All ranks must call this together.

    Args:
        q: (batch, heads, own length, width).
        k: (batch, heads of keys, own length, width). Each head of keys serves the same number of consecutive heads of
            ``q``.
        v: As ``k``; its width may differ.
        bias: (batch, own length), added to the scores of each key; -inf hides the key. Given on all ranks or on none.
        causal: Hides later positions of the whole sequence.
        scale: Factor of the scores.
        sequence: The division of the positions over ranks.
    """
    output: Tensor = _Ring.apply(q, k, v, bias, causal, scale, sequence)  # type: ignore[no-untyped-call]
    return output


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        causal: bool,
        scale: float,
        sequence: DividedSequence,
    ) -> Tensor:
        state = _Online(q, k.shape[1], v.shape[-1])
        for rank, keys, values, biases in _travelling(k, v, bias, sequence):
            for tile in _tiles(sequence, rank, causal):
                state.add(tile.scores(state.q, keys, biases, scale), tile, values)
        output, log_sum = state.finish()
        ctx.save_for_backward(q, k, v, bias, output, log_sum)
        ctx.causal, ctx.scale, ctx.sequence = causal, scale, sequence
        return output.flatten(1, 2).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, output, log_sum = ctx.saved_tensors
        if torch.is_grad_enabled():

            def again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return ulysses_attention(q, k, v, bias, ctx.causal, ctx.scale, ctx.sequence)

            with sdpa_kernel(SDPBackend.MATH):  # PyTorch's other kernels have no second derivatives
                found = differentiable_gradients(again, (q, k, v), ctx.needs_input_grad, gradient)
            return *found, None, None, None, None
        given = _grouped(gradient, k.shape[1])
        shared = _Shared(_grouped(q, k.shape[1]), given, log_sum, (given * output).sum(-1), ctx.scale)
        dq, home = torch.zeros_like(shared.q), _Homing(ctx.sequence)
        for rank, keys, values, biases in _travelling(k, v, bias, ctx.sequence):
            dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
            for tile in _tiles(ctx.sequence, rank, ctx.causal):
                shared.add(tile, keys, values, biases, (dq, dk, dv))
            home.send(dk, dv)
        dk, dv = home.arrive()
        return dq.flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


class _Tile(NamedTuple):
    """A tile of scores: consecutive queries of this rank (rows) and consecutive keys of one rank (columns)."""

    rows: slice
    columns: slice
    hidden: Tensor | None
    """(rows, columns) bool, True where a key comes after the query and is hidden; None if no key is hidden."""

    def scores(self, q: Tensor, keys: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        """Returns the scores: (batch, heads of keys, heads for each, rows, columns)."""
        found = _product(q[:, :, :, self.rows] * scale, keys[:, :, self.columns].mT)
        if bias is not None:
            found += bias[:, None, None, None, self.columns]
        return found if self.hidden is None else found.masked_fill_(self.hidden.to(q.device), -math.inf)


def _tiles(sequence: DividedSequence, rank: int, causal: bool) -> Iterator[_Tile]:
    """Yields the tiles of this rank's queries with the keys of ``rank``, except tiles that are hidden entirely."""
    for rows, queries in _cut(sequence.local_positions):
        for columns, keys in _cut(sequence.pieces[rank]):
            if not causal or keys[-1] <= queries[0]:
                yield _Tile(rows, columns, None)
            elif keys[0] <= queries[-1]:
                after = (
                    torch.arange(keys.start, keys.stop) > torch.arange(queries.start, queries.stop)[:, None]
                )
                yield _Tile(rows, columns, after)


def _cut(piece: Sequence[range]) -> Iterator[tuple[slice, range]]:
    """Cuts a piece into tiles. Yields the slice of each within the piece, and its range in the whole sequence."""
    begin = 0
    for chunk in piece:
        for start in range(0, len(chunk), _TILE):
            tile = chunk[start : start + _TILE]
            yield slice(begin + start, begin + start + len(tile)), tile
        begin += len(chunk)


class _Online:
    """Online softmax: takes scores tile by tile and keeps the mean of the values weighted by it."""

    def __init__(self, q: Tensor, heads: int, width: int) -> None:
        self.q = _grouped(q, heads)
        self._sum = self.q.new_zeros(self.q.shape[:-1])
        self._top = torch.full_like(self._sum, -math.inf)
        self._mean = self.q.new_zeros(*self.q.shape[:-1], width)

    def add(self, scores: Tensor, tile: _Tile, values: Tensor) -> None:
        place = (..., tile.rows)
        top = torch.maximum(self._top[place], scores.amax(-1))
        under = top.masked_fill(top == -math.inf, 0.0)  # top is -inf if all keys were hidden so far
        weights, decay = torch.exp(scores - under[..., None]), torch.exp(self._top[place] - under)
        self._sum[place] = self._sum[place] * decay + weights.sum(-1)
        rows = (..., tile.rows, slice(None))
        self._mean[rows] = self._mean[rows] * decay[..., None] + _product(weights, values[:, :, tile.columns])
        self._top[place] = top

    def finish(self) -> tuple[Tensor, Tensor]:
        """Returns the output and the logarithm of the sum of exponentials. For a query whose keys are all hidden, the
        output is 0 and the logarithm is infinite."""
        seen = self._sum > 0
        log_sum = torch.where(seen, self._top + self._sum.log(), math.inf)
        return self._mean / self._sum.masked_fill(~seen, 1.0)[..., None], log_sum


class _Shared(NamedTuple):
    """The inputs of backward that all tiles need."""

    q: Tensor
    given: Tensor
    """The gradient of the output."""
    log_sum: Tensor
    dot: Tensor
    """For each query, the dot product of the output and its gradient."""
    scale: float

    def add(
        self, tile: _Tile, keys: Tensor, values: Tensor, bias: Tensor | None, into: tuple[Tensor, ...]
    ) -> None:
        """Adds the tile's terms to the gradients of queries, keys and values, in place."""
        dq, dk, dv = into
        rows, q, given = tile.rows, self.q[:, :, :, tile.rows], self.given[:, :, :, tile.rows]
        weights = torch.exp(tile.scores(self.q, keys, bias, self.scale) - self.log_sum[..., rows, None])
        dv[:, :, tile.columns] += weights.flatten(2, 3).mT @ given.flatten(2, 3)
        of_weights = _product(given, values[:, :, tile.columns].mT)
        of_scores = weights * (of_weights - self.dot[..., rows, None]) * self.scale
        dq[:, :, :, rows] += _product(of_scores, keys[:, :, tile.columns])
        dk[:, :, tile.columns] += of_scores.flatten(2, 3).mT @ q.flatten(2, 3)


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Reshapes to (batch, heads of keys, heads for each, length, width), in the type of sums."""
    return _summed_in(torch.unflatten(x, 1, (heads, -1)))


def _summed_in(x: Tensor) -> Tensor:
    """Converts ``x`` to the type of sums: float64 if it is float64, else float32."""
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Multiplies (batch, heads of keys, heads for each, rows, n) by (batch, heads of keys, n, columns)."""
    return torch.unflatten(x.flatten(2, 3) @ y, 2, x.shape[2:4])


# Messages around the ring


def _travelling(
    k: Tensor, v: Tensor, bias: Tensor | None, sequence: DividedSequence
) -> Iterator[tuple[int, Tensor, Tensor, Tensor | None]]:
    """Yields for each hop the rank that owns the keys and values at hand, its keys, values and bias, in the type of
    sums."""
    like = [k, v] if bias is None else [k, v, bias[:, None, :, None].to(k.dtype)]
    packet, ranks = _packed(like), sequence.group.size()
    for hop in range(ranks):
        rank = (sequence.rank - hop) % ranks
        coming = _pass_on(packet, like, rank - 1, sequence, _KEYS) if hop < ranks - 1 else None
        keys, values, *rest = map(_summed_in, _unpacked(packet, like, sequence.sizes[rank]))
        yield rank, keys, values, rest[0][:, 0, :, 0] if rest else None
        if coming is not None:
            packet = coming()


class _Homing:
    """Gradients of keys and values: they travel around the ring, and each rank adds its terms."""

    def __init__(self, sequence: DividedSequence) -> None:
        self._sequence, self._rank = sequence, sequence.rank
        self._coming: Callable[[], Tensor] | None = None

    def send(self, *own: Tensor) -> None:
        """Adds this rank's terms to the gradients that come from the previous rank, and passes the sum on."""
        packet = _packed(own)
        if self._coming is not None:
            packet += self._coming()
        self._like = own
        self._rank -= 1
        self._coming = _pass_on(packet, own, self._rank, self._sequence, _GRADIENTS)

    def arrive(self) -> list[Tensor]:
        """Waits for the complete gradients of this rank's own keys and values, after the last hop."""
        assert self._coming is not None
        return _unpacked(self._coming(), self._like, self._sequence.size)


def _pass_on(
    packet: Tensor, like: Sequence[Tensor], rank: int, sequence: DividedSequence, tag: int
) -> Callable[[], Tensor]:
    """Starts sending the packet to the next rank and receiving the one with ``rank``'s keys. Returns a function that
    waits for it."""
    size = sequence.sizes[rank % sequence.group.size()]
    numbers = sum(size * x.shape[0] * x.shape[1] * x.shape[3] for x in like)
    return shifting(packet, 1, (numbers,), sequence.group, tag)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.detach().flatten() for x in tensors])


def _unpacked(packet: Tensor, like: Sequence[Tensor], size: int) -> list[Tensor]:
    """Splits a packet into tensors of (batch, heads, ``size``, width) each."""
    shapes = [(x.shape[0], x.shape[1], size, x.shape[3]) for x in like]
    parts = torch.split(packet, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
