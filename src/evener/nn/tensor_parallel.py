"""Tensor parallelism: layers whose weights are divided over ranks that compute the same samples.

A region of divided layers begins with a layer that computes some of its outputs (columns of ``W`` in ``x W``) and ends
with a layer that reads some of its inputs (rows of ``W``). In between, each rank has its own part of every sample's
features::

                        W_1                            W_2
    x ─ enter ─┬─▶ columns 0 1 2 ─▶ activation ─▶ rows 0 1 2 ─┬─ sum ─▶ + bias        rank 0
               └─▶ columns 3 4   ─▶ activation ─▶ rows 3 4   ─┘                       rank 1

Forward communicates once, at the end of the region; backward communicates once, at its beginning. These are the
operators *g* and *f* of Shoeybi et al., "Megatron-LM", 2019. A divided embedding holds some of the words and is a
region of its own.

A layer is divided in place: its class changes, and its names, hooks and references stay. The layers do not use
PyTorch's DTensor, which refuses widths that do not divide evenly, computes convolutions wrong without an error, and
cannot be mixed with plain parameters in foreach optimizers, clipping and DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from evener.errors import ConfigurationError, TaskError
from evener.nn.collectives import all_gather, all_reduce, enter, split
from evener.nn.context import current
from evener.nn.sequence_parallel import SequenceStream
from evener.nn.tensor_region import RegionRng
from evener.nn.unowned import Shared
from evener.nn.weight_stand_in import seen
from evener.torch_internals.modules import own_parameters


@dataclass(frozen=True)
class LengthDivision:
    """The division of a length (of features, channels, heads or words) over the ranks of a group."""

    group: ProcessGroup
    pieces: tuple[range, ...]
    """The range of each rank: in order, without gaps, none empty."""
    index: int
    """This rank's place in ``pieces``."""

    @property
    def local_length(self) -> range:
        return self.pieces[self.index]

    @property
    def sizes(self) -> list[int]:
        return [len(piece) for piece in self.pieces]

    @property
    def whole(self) -> int:
        """The length that is divided."""
        return self.pieces[-1].stop


class Divided(nn.Module):
    """A layer of which this rank holds a part. :func:`divide_layer` makes it.

    Another module that read the weight, as in ``F.linear(x, embedding.weight)``, would take this rank's part for the
    whole. So while a micro-batch is computed, ``weight`` is a stand-in that has the shape of the whole weight and no
    values (:class:`SeenWeight`). A weight that FSDP2 has sharded over further ranks is returned as it is, because
    FSDP2 reads it before it gathers it.
    """

    held: ClassVar[dict[str, int]]
    """Maps the name of each divided parameter to the dimension along which it is divided."""
    layer: str = ""
    """The qualified name in the model."""
    stream: SequenceStream | None = None
    """The sequence stream that contains the layer, if positions are divided between the divided layers."""
    apart: RegionRng | None = None
    """Switches to the rank's own random numbers, if this layer begins or ends a region that draws some."""
    _parts = Shared[LengthDivision]()

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name == "weight" and current() is not None and type(found) is nn.Parameter:
            dim, whole = self.held["weight"], self.parts.whole
            return seen(found, (*found.shape[:dim], whole, *found.shape[dim + 1 :]), self.layer)
        return found

    @property
    def parts(self) -> LengthDivision:
        """The division of the layer.

        Raises:
            ConfigurationError: If the layer was pickled into another process, which has no such group.
        """
        return self._parts.value_for(self)

    def local_part(self, name: str) -> Tensor | None:
        """Returns this rank's part of the parameter ``name``."""
        return own_parameters(self)[name]

    def extra_repr(self) -> str:
        parts = self._parts.value
        held = "" if parts is None else f", part={parts.local_length.start}:{parts.local_length.stop}"
        return super().extra_repr() + held


Compute = Callable[[Any, Tensor, Any, Any], Tensor]
"""Maps a layer, its input, weight and bias to the output."""


class ColumnLayer(Divided):
    """A layer that computes some of its output features."""

    held: ClassVar = {"weight": 0, "bias": 0}
    compute: ClassVar[Compute]
    whole: Tensor | None = None
    """The undivided input for the next call, in place of the argument (set by :class:`StandIn`)."""

    def forward(self, input: Tensor) -> Tensor:
        if self.whole is not None:
            input, self.whole = self.whole, None
        if self.apart is not None and self.training:
            self.apart.begin(input.device)
        weight, bias = self.local_part("weight"), self.local_part("bias")
        assert weight is not None
        if self.stream is not None:
            return self.stream.columns(self.layer, input, weight, bias)
        return type(self).compute(self, enter(input, self.parts.group), weight, bias)


class RowLayer(Divided):
    """A layer that reads some of its input features and sums its outputs over the ranks."""

    held: ClassVar = {"weight": 1}
    features: ClassVar[int] = -1
    """The dimension of the features or channels in the input."""
    between: tuple[tuple[nn.Module, str], ...] = ()
    """Undivided parameters of other modules in the region that this layer ends, as (module, name). Each rank has only
    a term of their gradients."""
    compute: ClassVar[Compute]

    def forward(self, input: Tensor) -> Tensor:
        parts = self.parts
        if self.apart is not None:
            self.apart.end()
        if input.shape[self.features] == parts.whole:
            input = split(input, parts.group, self.features, parts.sizes)
        elif input.shape[self.features] != len(parts.local_length):
            raise TaskError(
                f"{self.layer} reads {len(parts.local_length)} of {parts.whole} features on this rank and got "
                f"{input.shape[self.features]}: the colwise layers before it must make as many, in runs of one length"
            )
        partial = type(self).compute(self, input, self.local_part("weight"), None)
        output = self._summed(partial)
        bias = self.local_part("bias")
        return output if bias is None else output + bias.view(-1, *[1] * (-1 - self.features))

    def _summed(self, partial: Tensor) -> Tensor:
        if self.stream is not None:
            return self.stream.sum(self.layer, partial)
        total: Tensor = all_reduce(partial, self.parts.group, replicated=True)
        return total

    def ends_stream(self) -> Iterator[nn.Parameter]:
        """Yields the bias, which is added to the positions of this rank only."""
        bias = own_parameters(self)["bias"]
        yield from () if bias is None else (bias,)


def _multiplied(layer: nn.Linear, input: Tensor, weight: Any, bias: Any) -> Tensor:
    return F.linear(input, weight, bias)


class ColumnLinear(ColumnLayer, nn.Linear):
    """``nn.Linear`` that computes some of its output features. Input: (..., in_features), the same on all ranks.
    Output: (..., own features)."""

    compute = _multiplied


class RowLinear(RowLayer, nn.Linear):
    """``nn.Linear`` that reads some of its input features. Input: (..., own features), or (..., in_features), of which
    each rank takes its part. Output: the sum over the ranks, (..., out_features), the same on all."""

    compute = _multiplied


class VocabularyLinear(ColumnLinear):
    """:class:`ColumnLinear` with one output score for each word. It gathers the scores, so that all ranks have all.

    In training the scores stay divided if the loss accepts that (:class:`~evener.nn.VocabularyParallelCrossEntropy`).
    """

    stays_divided = False
    """True if each rank keeps only the scores of its own words in training."""

    def forward(self, input: Tensor) -> Tensor:
        scores = super().forward(input)
        if self.stays_divided and self.training:
            return scores
        return all_gather(scores, self.parts.group, -1, self.parts.sizes, replicated=True)


def _is_elsewhere(words: Tensor, parts: LengthDivision) -> Tensor:
    """Returns True for each word of another rank. A word that does not exist is False: looking it up raises."""
    here = (words >= parts.local_length.start) & (words < parts.local_length.stop)
    return ~here & (words >= 0) & (words < parts.whole)


class VocabularyEmbedding(Divided, nn.Embedding):
    """``nn.Embedding`` that holds some of the words: each rank looks up its own, and a sum joins them."""

    held: ClassVar = {"weight": 0}

    def forward(self, input: Tensor) -> Tensor:
        parts, weight = self.parts, self.local_part("weight")
        assert weight is not None
        local, elsewhere = input - parts.local_length.start, _is_elsewhere(input, parts)
        lookup = self._sparsely if self.sparse else self._densely
        return all_reduce(lookup(local, elsewhere, weight), parts.group, replicated=True)

    def _densely(self, local: Tensor, elsewhere: Tensor, weight: Tensor) -> Tensor:
        found = F.embedding(local.masked_fill(elsewhere, 0), weight, self._own_padding)
        return found.masked_fill(elsewhere[..., None], 0)

    def _sparsely(self, local: Tensor, elsewhere: Tensor, weight: Tensor) -> Tensor:
        """Looks up only this rank's words: a sparse gradient lists every row that was looked up, also if it is 0."""
        found = F.embedding(local[~elsewhere], weight, self._own_padding, sparse=True)
        return found.new_zeros(*local.shape, found.shape[-1]).masked_scatter(~elsewhere[..., None], found)

    @property
    def _own_padding(self) -> int | None:
        padding, own = self.padding_idx, self.parts.local_length
        return padding - own.start if padding is not None and padding in own else None


class VocabularyBag(Divided, nn.EmbeddingBag):
    """``nn.EmbeddingBag`` that holds some of the words, for modes sum and mean: each rank adds up its own words."""

    held: ClassVar = {"weight": 0}

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        words, factors, bags = self._flat(input, offsets, per_sample_weights)
        kept = (
            torch.ones_like(words, dtype=torch.bool)
            if self.padding_idx is None
            else words != self.padding_idx
        )
        local, here = words - self.parts.local_length.start, kept & ~_is_elsewhere(words, self.parts)
        own = self._own_sparsely if self.sparse else self._own_densely
        total: Tensor = all_reduce(own(local, here, factors, bags), self.parts.group, replicated=True)
        if self.mode == "sum":
            return total
        ones = total.new_ones(1, 1)
        return total / self._added(torch.zeros_like(words), ones, bags, kept.to(total.dtype)).clamp(min=1)

    def _flat(
        self, input: Tensor, offsets: Tensor | None, factors: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns the words of all bags (flat), their factors, and the bag edges (bags + 1,). Checks their shapes."""
        if factors is not None and (self.mode != "sum" or factors.shape != input.shape):
            raise TaskError(
                f"{self.layer}: per_sample_weights of shape {tuple(factors.shape)} for words of shape "
                f"{tuple(input.shape)} and mode {self.mode!r}: they are one for each word, and go with 'sum'"
            )
        if factors is not None:
            factors = enter(factors, self.parts.group).flatten()
        if input.dim() == 2 and offsets is None:
            bags = torch.arange(len(input) + 1, device=input.device) * input.shape[1]
        elif input.dim() == 1 and offsets is not None:
            bags = offsets if self.include_last_offset else F.pad(offsets, (0, 1), value=len(input))
        else:
            raise TaskError(
                f"{self.layer}: give words (bags, words of each), or (words) with the offsets of the bags"
            )
        return input.flatten(), factors, bags

    def _added(
        self, rows: Tensor, weight: Tensor, bags: Tensor, factors: Tensor | None, sparse: bool = False
    ) -> Tensor:
        bags = bags.to(rows.dtype)
        given: dict[str, Any] = {"mode": "sum", "sparse": sparse, "per_sample_weights": factors}
        return F.embedding_bag(rows, weight, bags, include_last_offset=True, **given)

    def _own_densely(self, local: Tensor, here: Tensor, factors: Tensor | None, bags: Tensor) -> Tensor:
        """Adds up each bag, with the words of other ranks multiplied by 0."""
        weight = self.local_part("weight")
        assert weight is not None
        factors = here.to(weight.dtype) if factors is None else factors.masked_fill(~here, 0)
        return self._added(local.masked_fill(~here, 0), weight, bags, factors)

    def _own_sparsely(self, local: Tensor, here: Tensor, factors: Tensor | None, bags: Tensor) -> Tensor:
        """Adds up each bag from this rank's words only: a sparse gradient lists every row that was looked up."""
        weight = self.local_part("weight")
        assert weight is not None
        before = F.pad(here.cumsum(0), (1, 0))[bags]
        return self._added(
            local[here], weight, before, None if factors is None else factors[here], sparse=True
        )


Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
_CONVOLVE: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _convolved(layer: Convolution, input: Tensor, weight: Any, bias: Any) -> Tensor:
    function = _CONVOLVE[len(layer.kernel_size)]
    return function(input, weight, bias, layer.stride, layer.padding, layer.dilation)


class ColumnConv1d(ColumnLayer, nn.Conv1d):
    """``nn.Conv1d`` that computes some of its output channels."""

    compute = _convolved


class ColumnConv2d(ColumnLayer, nn.Conv2d):
    """``nn.Conv2d`` that computes some of its output channels."""

    compute = _convolved


class ColumnConv3d(ColumnLayer, nn.Conv3d):
    """``nn.Conv3d`` that computes some of its output channels."""

    compute = _convolved


class RowConv1d(RowLayer, nn.Conv1d):
    """``nn.Conv1d`` that reads some of its input channels."""

    features: ClassVar = -2
    compute = _convolved


class RowConv2d(RowLayer, nn.Conv2d):
    """``nn.Conv2d`` that reads some of its input channels."""

    features: ClassVar = -3
    compute = _convolved


class RowConv3d(RowLayer, nn.Conv3d):
    """``nn.Conv3d`` that reads some of its input channels."""

    features: ClassVar = -4
    compute = _convolved


COLUMNS: dict[type[nn.Module], type[Divided]] = {
    nn.Linear: ColumnLinear,
    nn.Conv1d: ColumnConv1d,
    nn.Conv2d: ColumnConv2d,
    nn.Conv3d: ColumnConv3d,
}
ROWS: dict[type[nn.Module], type[Divided]] = {
    nn.Linear: RowLinear,
    nn.Conv1d: RowConv1d,
    nn.Conv2d: RowConv2d,
    nn.Conv3d: RowConv3d,
}
VOCABULARY: dict[type[nn.Module], type[Divided]] = {
    nn.Linear: VocabularyLinear,
    nn.Embedding: VocabularyEmbedding,
    nn.EmbeddingBag: VocabularyBag,
}


def divide_layer(
    layer: nn.Module, kinds: dict[type[nn.Module], type[Divided]], parts: LengthDivision, name: str
) -> Divided:
    """Turns ``layer`` into a divided layer. The caller must cut its parameters.

    Args:
        layer: A layer of a class in ``kinds``, the same on all ranks; changed in place.
        kinds: ``COLUMNS``, ``ROWS`` or ``VOCABULARY``.
        parts: The division of the features, channels or words.
        name: The layer's qualified name, for error messages.

    Raises:
        ConfigurationError: If the layer's class is not in ``kinds``.
    """
    if type(layer) not in kinds:
        known = ", ".join(kind.__name__ for kind in kinds)
        raise ConfigurationError(
            f"{name}, a {type(layer).__name__}, cannot be divided so; it must be one of {known}"
        )
    layer.__class__ = kinds[type(layer)]
    assert isinstance(layer, Divided)
    layer.layer, layer._parts = name, Shared(parts)
    return layer
