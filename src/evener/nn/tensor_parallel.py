"""Layers whose weights are divided over ranks that compute the same samples.

A region of divided layers begins with one that makes some of its outputs (columns, in the words of ``x W``) and ends
with one that reads some of its inputs (rows). In between each rank has its own part of every sample's features::

                        W_1                            W_2
    x ─ enter ─┬─▶ columns 0 1 2 ─▶ activation ─▶ rows 0 1 2 ─┬─ sum ─▶ + bias        rank 0
               └─▶ columns 3 4   ─▶ activation ─▶ rows 3 4   ─┘                       rank 1

One message forward, where the region ends, and one backward, where it begins: the operators *f* and *g* of Shoeybi et
al., "Megatron-LM", 2019. An embedding holds some of the words, and ends its region by itself.

A layer is divided in its place: its class changes, and names, hooks and references to it stay. PyTorch's DTensor is not
what stands below, for it refuses widths that do not divide, computes convolutions wrong without an error, and does not
mix with plain parameters in foreach optimizers, clipping and DistributedDataParallel.
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
from evener.nn.sequence_parallel import Stream
from evener.nn.tensor_region import Apart
from evener.nn.unowned import Shared
from evener.nn.weight_stand_in import seen
from evener.torch_internals.module_tensors import own_parameters


@dataclass(frozen=True)
class Parts:
    """How a length is divided over the ranks of a group."""

    group: ProcessGroup
    pieces: tuple[range, ...]
    """Of all ranks, in order and without gaps, none empty."""
    index: int
    """This rank's."""

    @property
    def own(self) -> range:
        return self.pieces[self.index]

    @property
    def sizes(self) -> list[int]:
        return [len(piece) for piece in self.pieces]

    @property
    def whole(self) -> int:
        """The length that is divided."""
        return self.pieces[-1].stop


class Divided(nn.Module):
    """A layer of which this rank holds a part, made by :func:`divide_layer`.

    A part that another module reads, as in ``F.linear(x, embedding.weight)``, would be taken for the whole. So while
    a micro-batch is computed others see its form alone, and no numbers (:class:`SeenWeight`). One that is in parts over
    further ranks, of which nothing plain can be made, is shown to PyTorch's FSDP2, which looks at it before it gathers
    it.
    """

    held: ClassVar[dict[str, int]]
    """The parameters that are divided, and along which dimension."""
    layer: str = ""
    """Its qualified name in the model."""
    stream: Stream | None = None
    """The stream that it is in, if positions are divided where features are not."""
    apart: Apart | None = None
    """Where ranks draw random numbers of their own, if this layer begins such a region or ends it."""
    _parts = Shared[Parts]()

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name == "weight" and current() is not None and type(found) is nn.Parameter:
            dim, whole = self.held["weight"], self.parts.whole
            return seen(found, (*found.shape[:dim], whole, *found.shape[dim + 1 :]), self.layer)
        return found

    @property
    def parts(self) -> Parts:
        """How it is divided.

        Raises:
            ConfigurationError: In another process, which is none of these ranks.
        """
        return self._parts.of(self)

    def own(self, name: str) -> Tensor | None:
        """This rank's part of a parameter."""
        return own_parameters(self)[name]

    def extra_repr(self) -> str:
        parts = self._parts.value
        held = "" if parts is None else f", part={parts.own.start}:{parts.own.stop}"
        return super().extra_repr() + held


Compute = Callable[[Any, Tensor, Any, Any], Tensor]
"""From a layer, its input, weight and bias, the output."""


class ColumnLayer(Divided):
    """Makes some of its features."""

    held: ClassVar = {"weight": 0, "bias": 0}
    compute: ClassVar[Compute]
    whole: Tensor | None = None
    """What it reads in the place of a stand-in, until its next call."""

    def forward(self, input: Tensor) -> Tensor:
        if self.whole is not None:
            input, self.whole = self.whole, None
        if self.apart is not None and self.training:
            self.apart.begin(input.device)
        weight, bias = self.own("weight"), self.own("bias")
        assert weight is not None
        if self.stream is not None:
            return self.stream.columns(self.layer, input, weight, bias)
        return type(self).compute(self, enter(input, self.parts.group), weight, bias)


class RowLayer(Divided):
    """Reads some of its features."""

    held: ClassVar = {"weight": 1}
    features: ClassVar[int] = -1
    """The dimension of the features, or channels."""
    between: tuple[tuple[nn.Module, str], ...] = ()
    """Parameters of others in the region that this layer ends, of whose gradients each rank has a term."""
    compute: ClassVar[Compute]

    def forward(self, input: Tensor) -> Tensor:
        parts = self.parts
        if self.apart is not None:
            self.apart.end()
        if input.shape[self.features] == parts.whole:
            input = split(input, parts.group, self.features, parts.sizes)
        elif input.shape[self.features] != len(parts.own):
            raise TaskError(
                f"{self.layer} reads {len(parts.own)} of {parts.whole} features on this rank and got "
                f"{input.shape[self.features]}: the colwise layers before it must make as many, in runs of one length"
            )
        partial = type(self).compute(self, input, self.own("weight"), None)
        output = self._summed(partial)
        bias = self.own("bias")
        return output if bias is None else output + bias.view(-1, *[1] * (-1 - self.features))

    def _summed(self, partial: Tensor) -> Tensor:
        if self.stream is not None:
            return self.stream.sum(self.layer, partial)
        total: Tensor = all_reduce(partial, self.parts.group, replicated=True)
        return total

    def ends_stream(self) -> Iterator[nn.Parameter]:
        """What is added to the positions of this rank alone."""
        bias = own_parameters(self)["bias"]
        yield from () if bias is None else (bias,)


def _multiplied(layer: nn.Linear, input: Tensor, weight: Any, bias: Any) -> Tensor:
    return F.linear(input, weight, bias)


class ColumnLinear(ColumnLayer, nn.Linear):
    """``nn.Linear`` that makes some of its output features: from (..., in_features), alike on all ranks, the part
    (..., own features)."""

    compute = _multiplied


class RowLinear(RowLayer, nn.Linear):
    """``nn.Linear`` that reads some of its input features: from (..., own features), the sum over the ranks (...,
    out_features), alike on all. An input that has all features is cut."""

    compute = _multiplied


class VocabularyLinear(ColumnLinear):
    """:class:`ColumnLinear` of scores, one for each word, which are gathered, so that all ranks have all scores.

    In training they stay apart where the loss does without the others:
    :class:`~evener.nn.VocabularyParallelCrossEntropy`.
    """

    stays_divided = False
    """Whether the scores of other words are left to their ranks in training."""

    def forward(self, input: Tensor) -> Tensor:
        scores = super().forward(input)
        if self.stays_divided and self.training:
            return scores
        return all_gather(scores, self.parts.group, -1, self.parts.sizes, replicated=True)


def _is_elsewhere(words: Tensor, parts: Parts) -> Tensor:
    """Whether another rank has the word. One that none has is looked up here, and refused as by PyTorch's layer."""
    here = (words >= parts.own.start) & (words < parts.own.stop)
    return ~here & (words >= 0) & (words < parts.whole)


class VocabularyEmbedding(Divided, nn.Embedding):
    """``nn.Embedding`` that holds some of the words: each rank looks up its own, and the sum over the ranks has all."""

    held: ClassVar = {"weight": 0}

    def forward(self, input: Tensor) -> Tensor:
        parts, weight = self.parts, self.own("weight")
        assert weight is not None
        local, elsewhere = input - parts.own.start, _is_elsewhere(input, parts)
        lookup = self._sparsely if self.sparse else self._densely
        return all_reduce(lookup(local, elsewhere, weight), parts.group, replicated=True)

    def _densely(self, local: Tensor, elsewhere: Tensor, weight: Tensor) -> Tensor:
        found = F.embedding(local.masked_fill(elsewhere, 0), weight, self._own_padding)
        return found.masked_fill(elsewhere[..., None], 0)

    def _sparsely(self, local: Tensor, elsewhere: Tensor, weight: Tensor) -> Tensor:
        """The gradient names the rows that were looked up, also where it is zero: no rows but these may be."""
        found = F.embedding(local[~elsewhere], weight, self._own_padding, sparse=True)
        return found.new_zeros(*local.shape, found.shape[-1]).masked_scatter(~elsewhere[..., None], found)

    @property
    def _own_padding(self) -> int | None:
        padding, own = self.padding_idx, self.parts.own
        return padding - own.start if padding is not None and padding in own else None


class VocabularyBag(Divided, nn.EmbeddingBag):
    """``nn.EmbeddingBag`` that holds some of the words, for sums and means: each rank adds up its own."""

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
        local, here = words - self.parts.own.start, kept & ~_is_elsewhere(words, self.parts)
        own = self._own_sparsely if self.sparse else self._own_densely
        total: Tensor = all_reduce(own(local, here, factors, bags), self.parts.group, replicated=True)
        if self.mode == "sum":
            return total
        ones = total.new_ones(1, 1)
        return total / self._added(torch.zeros_like(words), ones, bags, kept.to(total.dtype)).clamp(min=1)

    def _flat(
        self, input: Tensor, offsets: Tensor | None, factors: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The words of all bags, what they are multiplied by, and where each bag begins, and the last one ends."""
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
        """Words of other ranks are multiplied by zero."""
        weight = self.own("weight")
        assert weight is not None
        factors = here.to(weight.dtype) if factors is None else factors.masked_fill(~here, 0)
        return self._added(local.masked_fill(~here, 0), weight, bags, factors)

    def _own_sparsely(self, local: Tensor, here: Tensor, factors: Tensor | None, bags: Tensor) -> Tensor:
        """The gradient names the rows that were looked up: no rows but these may be."""
        weight = self.own("weight")
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
    """``nn.Conv1d`` that makes some of its output channels."""

    compute = _convolved


class ColumnConv2d(ColumnLayer, nn.Conv2d):
    """``nn.Conv2d`` that makes some of its output channels."""

    compute = _convolved


class ColumnConv3d(ColumnLayer, nn.Conv3d):
    """``nn.Conv3d`` that makes some of its output channels."""

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
    layer: nn.Module, kinds: dict[type[nn.Module], type[Divided]], parts: Parts, name: str
) -> Divided:
    """Makes ``layer`` compute with a part of its parameters, which whoever calls this cuts.

    Args:
        layer: Of a class of ``torch.nn``, alike on all ranks; changed in place.
        kinds: ``COLUMNS``, ``ROWS`` or ``VOCABULARY``.
        parts: Of the length that is divided.
        name: For messages.

    Raises:
        ConfigurationError: For a layer of another class.
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
