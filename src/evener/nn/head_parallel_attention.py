"""Tensor parallelism for ``nn.MultiheadAttention``: its heads are divided over ranks that compute the same samples.

Each head computes its queries, keys and values from the whole input. Its part of the output projection is a term of a
sum over all heads::

    x ─ enter ─┬─▶ q k v of heads 0 1 2 ─▶ attention ─▶ columns of heads 0 1 2 ─┬─ sum ─▶ + bias      rank 0
               └─▶ q k v of heads 3 4   ─▶ attention ─▶ columns of heads 3 4   ─┘                     rank 1

``F.multi_head_attention_forward`` derives the width of a head from the width of the input, which is wrong here. So this
module repeats its steps, in the same order and with the same kernels. Parameters keep their names. The fused projection
consists of three blocks (query, key, value), and a rank holds the rows of its heads in each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.nn.attention_dispatch import check_dropout, check_extra_keys, multi_head_attention
from evener.nn.collectives import all_gather, all_reduce, enter
from evener.nn.context import divided
from evener.nn.rng import drawing_apart
from evener.nn.sequence_parallel import SequenceStream
from evener.nn.tensor_parallel import LengthDivision
from evener.nn.unowned import Shared
from evener.torch_internals.compiling import outside_of_graphs
from evener.torch_internals.modules import own_parameters


class DividedAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` that computes some of the heads. :func:`divide_heads` makes it.

    Inputs, outputs, ``embed_dim`` and ``num_heads`` are those of the plain module, the same on all ranks. If positions
    are divided over further ranks (strategy ``context``), attention still covers whole sequences.
    """

    held: ClassVar[dict[str, tuple[int, int]]] = {
        "in_proj_weight": (0, 3),
        "in_proj_bias": (0, 3),
        "q_proj_weight": (0, 1),
        "k_proj_weight": (0, 1),
        "v_proj_weight": (0, 1),
        "bias_k": (2, 1),
        "bias_v": (2, 1),
    }
    """Maps each parameter that is divided by heads to (dimension, number of blocks). Of ``out_proj.weight`` a rank
    holds the columns of its heads."""
    layer: str = ""
    """The qualified name in the model."""
    stream: SequenceStream | None = None
    """The sequence stream that contains the module, if there is one. The query then has this rank's positions only; so
    have key and value if they are the query itself."""
    _heads = Shared[LengthDivision]()

    @outside_of_graphs  # a graph cannot wait for other ranks
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        options = (need_weights, attn_mask, average_attn_weights, is_causal)
        if query.dim() == 3:
            return self._attended(query, key, value, key_padding_mask, *options)
        sample = 0 if self.batch_first else 1
        padding = None if key_padding_mask is None else key_padding_mask[None]
        q, k, v = (x.unsqueeze(sample) for x in (query, key, value))
        output, weights = self._attended(q, k, v, padding, *options)
        return output.squeeze(sample), None if weights is None else weights[0]

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise ValueError("is_causal is a hint about attn_mask, which has to be given too")
        if (sequence := divided()) is not None:
            self._check_within_sequence()
            q, k, v = self._projected(query, key, value)
            mixed = multi_head_attention(q, k, v, sequence, attn_mask, padding, is_causal)
            return self._joined(mixed), None
        q, k, v = self._with_extra_keys(*self._projected(query, key, value))
        mask = self._mask(attn_mask, padding, q, k)
        if need_weights:
            output, weights = self._with_weights(q, k, v, mask)
            return self._joined(output), self._shown(weights, average)
        by_hint = is_causal and padding is None
        with self._drawing(q.device):
            output = F.scaled_dot_product_attention(q, k, v, None if by_hint else mask, self._rate, by_hint)
        return self._joined(output), None

    def _check_within_sequence(self) -> None:
        """Raises ConfigurationError for options that do not work with divided sequences: dropout and extra keys."""
        check_dropout(self._rate)
        extra = [name for name in ("bias_k", "bias_v") if own_parameters(self).get(name) is not None]
        check_extra_keys([*extra, *["add_zero_attn"] * self.add_zero_attn])

    @property
    def _parts(self) -> LengthDivision:
        """The division of the heads over the ranks."""
        return self._heads.value_for("a divided nn.MultiheadAttention")

    @property
    def _rate(self) -> float:
        return self.dropout if self.training else 0.0

    def _drawing(self, device: torch.device) -> AbstractContextManager[None]:
        return drawing_apart(self._parts.index, device) if self._rate else nullcontext()

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Returns queries, keys and values: (N, own heads, length, width of a head) each."""
        held = own_parameters(self)
        fused, bias, stream = held["in_proj_weight"], held["in_proj_bias"], self.stream
        if stream is not None and fused is not None and query is key is value:
            made = list(stream.columns(self.layer, query, fused, bias).chunk(3, -1))
        elif stream is not None:
            made = self._projected_from(query, key, value, lambda x, *p: stream.columns(self.layer, x, *p))
        else:
            made = self._projected_from(query, key, value, None)
        return [self._by_head(each) for each in made]

    def _projected_from(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        of_piece: Callable[..., Tensor] | None,
    ) -> list[Tensor]:
        """Applies the three projections one by one. If ``of_piece`` is given, it projects the query, and the inputs
        that are the same tensor: these have this rank's positions only."""
        entered = {id(x): enter(x, self._parts.group) for x in (query, key, value)}
        weights, biases = self._projections()
        return [
            of_piece(x, weight, bias)
            if of_piece is not None and x is query
            else F.linear(entered[id(x)], weight, bias)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        ]

    def _projections(self) -> tuple[list[Tensor], list[Tensor | None]]:
        held = own_parameters(self)
        fused, bias = held["in_proj_weight"], held["in_proj_bias"]
        if fused is not None:
            weights = list(fused.chunk(3))
        else:
            weights = [p for kind in "qkv" if (p := held[f"{kind}_proj_weight"]) is not None]
        return weights, [None] * 3 if bias is None else list(bias.chunk(3))

    def _by_head(self, x: Tensor) -> Tensor:
        rows = x if self.batch_first else x.transpose(0, 1)
        return rows.reshape(*rows.shape[:2], len(self._parts.local_length), self.head_dim).transpose(1, 2)

    def _with_extra_keys(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Appends the learned key and value and those of zeros, if the module has them."""
        held = own_parameters(self)
        extra_k, extra_v = held.get("bias_k"), held.get("bias_v")
        shape = (len(q), len(self._parts.local_length), 1, self.head_dim)
        if extra_k is not None and extra_v is not None:
            k, v = (
                torch.cat([x, extra.view(1, *shape[1:]).expand(shape)], 2)
                for x, extra in ((k, extra_k), (v, extra_v))
            )
        if self.add_zero_attn:
            k, v = (torch.cat([x, x.new_zeros(shape)], 2) for x in (k, v))
        return q, k, v

    def _mask(self, mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Returns the bias for the scores, (N or 1, own heads or 1, L, S), or None if there is no mask."""
        found: Tensor | None = None
        if mask is not None:
            found = _added(mask, q)
            if found.dim() == 3:
                of_heads = found.view(-1, self.num_heads, *found.shape[1:])
                own = self._parts.local_length
                found = of_heads[:, own.start : own.stop]
        if padding is not None:
            of_keys = _added(padding, q)[:, None, None]
            found = of_keys if found is None else found + of_keys
        return None if found is None else F.pad(found, (0, k.shape[2] - found.shape[-1]))

    def _with_weights(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        with self._drawing(q.device):
            weights = F.dropout(weights, self._rate)
        return weights @ v, weights

    def _joined(self, output: Tensor) -> Tensor:
        """Projects (N, own heads, L, width of a head) and sums over the ranks: the output of all heads."""
        held = own_parameters(self.out_proj)
        flat = output.transpose(1, 2).flatten(2)
        assert held["weight"] is not None
        whole = self._summed(F.linear(flat, held["weight"]))
        if held["bias"] is not None:
            whole = whole + held["bias"]
        return whole if self.batch_first else whole.transpose(0, 1)

    def _summed(self, partial: Tensor) -> Tensor:
        """Sums (N, L, width) over the ranks; in a stream, keeps this rank's positions."""
        if self.stream is not None:
            return self.stream.sum(self.layer, partial, dim=1)
        total: Tensor = all_reduce(partial, self._parts.group, replicated=True)
        return total

    def ends_stream(self) -> Iterator[nn.Parameter]:
        """Yields the bias of ``out_proj``, which is added to the positions of this rank only."""
        bias = own_parameters(self.out_proj)["bias"]
        yield from () if bias is None else (bias,)

    def _shown(self, weights: Tensor, average: bool) -> Tensor:
        """Returns the attention weights of all heads, or their mean, from this rank's: (N, own heads, L, S)."""
        parts = self._parts
        if average:
            total: Tensor = all_reduce(weights.sum(1), parts.group, replicated=True)
            mean: Tensor = total / self.num_heads
            return mean
        each: Tensor = all_gather(weights, parts.group, 1, parts.sizes, replicated=True)
        return each


def fewest_heads(attention: nn.MultiheadAttention) -> int:
    """Returns the smallest number of heads that any rank has."""
    return min(attention._parts.sizes) if isinstance(attention, DividedAttention) else attention.num_heads


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Converts a mask to numbers that are added to scores. A boolean mask is True where a key is hidden."""
    if mask.is_floating_point():
        return mask.to(like.dtype)
    return like.new_zeros(mask.shape).masked_fill(mask, -math.inf)


def divide_heads(attention: nn.MultiheadAttention, heads: LengthDivision, name: str) -> DividedAttention:
    """Turns ``attention`` in place into one that computes some of the heads. The caller must cut its parameters."""
    attention.__class__ = DividedAttention
    assert isinstance(attention, DividedAttention)
    attention.layer, attention._heads = name, Shared(heads)
    return attention
