"""Ulysses attention: each rank gets all positions for some of the heads, and sends the outputs back afterwards (Jacobs
et al., "DeepSpeed Ulysses", 2023).

::

             heads 0 1 2                         heads 0   heads 1 2
    rank 0   positions 0 1 6 7   ── q, k, v ──▶  all       .             attention as on one device,
    rank 1   positions 2 3 4 5   ◀── output ───  .         all           by whatever kernel PyTorch has for it

The numbers of heads and positions need not be divisible by the number of ranks: the pieces of an all-to-all may have
any length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from evener.errors import ConfigurationError
from evener.nn.collectives import all_gather, all_to_all
from evener.nn.sequence_layout import DividedSequence


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    sequence: DividedSequence,
) -> Tensor:
    """Computes the attention of this rank's queries to the keys of all ranks.

    Arguments are those of :func:`evener.nn.ring.ring_attention`. All ranks must call this together.

    Raises:
        ConfigurationError: If there are more ranks than heads of keys.
    """
    counts = [_heads(x.shape[1], k.shape[1], sequence) for x in (q, k, v)]
    q, k, v = _to_heads((q, k, v), counts, sequence)
    mixed = attend(q, k, v, _whole_bias(bias, sequence), causal, scale)
    return _to_positions(mixed, counts[0], sequence)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Computes attention over whole sequences by PyTorch's operator. The call bypasses any ``TorchFunctionMode``.

    Args:
        bias: (batch, length), added to the scores of each key.
    """
    mask = None if bias is None else bias[:, None, None, :].to(q.dtype)
    if mask is not None and causal:
        after = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        mask = mask.expand(-1, -1, q.shape[-2], -1).masked_fill(after, -math.inf)
    alone = causal and mask is None
    mixed: Tensor = torch.ops.aten.scaled_dot_product_attention.default(
        q, k, v, mask, 0.0, alone, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return mixed


def _heads(heads: int, of_keys: int, sequence: DividedSequence) -> list[int]:
    """Returns the number of heads of each rank. Heads that share their keys stay on one rank."""
    ranks = sequence.group.size()
    if of_keys < ranks:
        raise ConfigurationError(
            f"attention: {of_keys} heads of keys cannot be divided over {ranks} ranks by method 'ulysses'; use method "
            f"'ring', or at most {of_keys} ranks"
        )
    edges = [of_keys * rank // ranks * (heads // of_keys) for rank in range(ranks + 1)]
    return [stop - start for start, stop in pairwise(edges)]


def _to_heads(
    tensors: Sequence[Tensor], counts: Sequence[Sequence[int]], sequence: DividedSequence
) -> list[Tensor]:
    """Exchanges (batch, heads, own length, width) for (batch, own heads, length, width), all tensors in one message."""
    own = [count[sequence.rank] for count in counts]
    pieces = [torch.split(x, list(count), 1) for x, count in zip(tensors, counts, strict=True)]
    sent = [torch.cat([x.flatten() for x in for_rank]) for for_rank in zip(*pieces, strict=True)]
    shapes = [
        [(x.shape[0], heads, size, x.shape[3]) for x, heads in zip(tensors, own, strict=True)]
        for size in sequence.sizes
    ]
    came = _exchanged(sent, [sum(map(math.prod, of_rank)) for of_rank in shapes], sequence)
    found = [
        [
            part.view(shape)
            for part, shape in zip(torch.split(x, [*map(math.prod, of_rank)]), of_rank, strict=True)
        ]
        for x, of_rank in zip(came, shapes, strict=True)
    ]
    return [sequence.in_order(torch.cat(of_ranks, 2), 2) for of_ranks in zip(*found, strict=True)]


def _to_positions(mixed: Tensor, counts: Sequence[int], sequence: DividedSequence) -> Tensor:
    """Exchanges (batch, own heads, length, width) for (batch, heads, own length, width)."""
    batch, _, _, width = mixed.shape
    sent = [x.flatten() for x in sequence.by_rank(mixed, 2)]
    shapes = [(batch, heads, sequence.size, width) for heads in counts]
    came = _exchanged(sent, [math.prod(shape) for shape in shapes], sequence)
    return torch.cat([x.view(shape) for x, shape in zip(came, shapes, strict=True)], 1)


def _exchanged(sent: Sequence[Tensor], received: list[int], sequence: DividedSequence) -> tuple[Tensor, ...]:
    came = all_to_all(torch.cat(list(sent)), sequence.group, [len(x) for x in sent], received=received)
    return torch.split(came, received)


def _whole_bias(bias: Tensor | None, sequence: DividedSequence) -> Tensor | None:
    if bias is None:
        return None
    return sequence.in_order(all_gather(bias, sequence.group, 1, sequence.sizes), 1)
