"""Exact attention over sequences whose positions are divided over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from evener.errors import ConfigurationError
from evener.nn.context import divided
from evener.nn.ring import ring_attention
from evener.nn.sequence_layout import DividedSequence
from evener.nn.ulysses import attend, ulysses_attention
from evener.torch_internals.compiling import outside_of_graphs

Method = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float, DividedSequence], Tensor]

METHODS: dict[str, Method] = {"ring": ring_attention, "ulysses": ulysses_attention}


@outside_of_graphs  # a graph cannot wait for other ranks
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Computes ``softmax(scale * q @ k.T) @ v`` over the whole sequence: (batch, heads, length, width of v).

    Under strategy ``context`` the positions of each sequence are divided over ranks. Each rank passes its own positions
    and gets the output for these; all ranks must call this together. Elsewhere this is
    ``torch.nn.functional.scaled_dot_product_attention``. A query that may see no key gets 0.

    Args:
        q: (batch, heads, length, width).
        k: (batch, heads of keys, length, width). The number of heads must divide that of ``q``; each head of keys
            serves the same number of consecutive heads of ``q`` (grouped-query attention).
        v: As ``k``; its width may differ.
        causal: Hides later positions of the whole sequence from each position.
        key_padding: (batch, length) bool, True where a key is padding and hidden. Given on all ranks or on none.
        scale: 1 / sqrt(width) by default.

    Raises:
        ConfigurationError: If shapes or types do not fit together, or the length is not this rank's number of
            positions.
    """
    _check(q, k, v, key_padding)
    bias = None
    if key_padding is not None:
        bias = torch.zeros_like(key_padding, dtype=q.dtype).masked_fill_(key_padding, -math.inf)
    return attention_to(q, k, v, bias, causal, scale)


def attention_to(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """Computes :func:`attention` with a ``bias`` (batch, length) that is added to the scores of each key."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    sequence = divided()
    if sequence is None:
        return attend(q, k, v, bias, causal, factor)
    if q.shape[2] != sequence.size or k.shape[2] != sequence.size:
        raise ConfigurationError(
            f"attention: queries of length {q.shape[2]} and keys of length {k.shape[2]}, but this rank has "
            f"{sequence.size} of the {sequence.length} positions of the sequences. Attention within a divided sequence "
            "is served, to or from another one is not"
        )
    return METHODS[sequence.method](q, k, v, bias, causal, factor, sequence)


def _check(q: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None) -> None:
    shapes = f"queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}"
    if {q.dim(), k.dim(), v.dim()} != {4}:
        raise ConfigurationError(f"attention: {shapes}; each must be (batch, heads, length, width)")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ConfigurationError(f"attention: {shapes} do not fit together")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ConfigurationError(f"attention: {shapes}; the heads of keys must divide those of queries")
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise ConfigurationError(
            f"attention: queries, keys and values are {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if key_padding is not None and (
        key_padding.dtype != torch.bool or key_padding.shape != (k.shape[0], k.shape[2])
    ):
        raise ConfigurationError(
            f"attention: key_padding is {key_padding.dtype} {tuple(key_padding.shape)}; it must be bool "
            f"{(k.shape[0], k.shape[2])}, True where a key is padding"
        )
