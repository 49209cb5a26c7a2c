"""Dropout whose mask depends on the sample and not on the device that computes it.

The state of an ordinary generator depends on what was drawn before, and so on the division of the batch. Here
every element of the mask is a function of (seed, step, sample, layer, call, element). That is a counter-based
generator in the sense of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). It uses integer
operations of torch only, whose overflow wraps around in the same way on CPU and CUDA.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014) derives a key for each
sample and layer. The mask itself is large, so it uses 32 bits: the hash of the element's number, keyed twice, goes
through the multiplications and shifts of ``lowbias32`` (Wellons, "Prospecting for hash functions", 2018). Each
word decides two elements with 16 bits each. So ``p`` is rounded to a multiple of 2⁻¹⁶, and the scale that keeps
the expectation is computed from the rounded ``p``.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from evener.errors import ConfigurationError
from evener.hardware.async_copy import send
from evener.nn.context import Scope, current
from evener.nn.fqn import clean_name
from evener.nn.sequence_layout import DividedSequence
from evener.nn.sequence_parallel import SequenceStream
from evener.torch_internals.compiling import outside_of_graphs
from evener.torch_internals.modules import AnyDropout

M = TypeVar("M", bound=nn.Module)

_GOLDEN = 0x9E3779B97F4A7C15
_SPLITMIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LOWBIAS = (0x7FEB352D, 0x846CA68B)


class Dropout(nn.Dropout):
    """``nn.Dropout`` whose mask does not depend on the division of the batch.

    Inside Evener's training step, the entries of ``batch_dim`` must be the samples of the micro-batch, or the same
    number of entries for each sample, as in (samples * tokens, features). A sample's mask depends on its own
    shape: if samples are padded to different lengths, it stays the same only if the padded dimension is the first
    after the samples. Outside of the training step, and in evaluation, this is ``nn.Dropout``.

    Args:
        p: Probability that an element is zeroed, rounded to a multiple of 2⁻¹⁶ (to neither 0 nor 1, unless it is one of
            them).
        inplace: Writes the result over the input.
        batch_dim: The dimension of the samples.
    """

    layer: str | None = None
    """The qualified name of the module in its model; the mask depends on it. :func:`name_dropouts` sets it."""
    batch_dim: int = 0
    part: tuple[int, int, range] | None = None
    """Set if the input has only this rank's features, as between divided layers: (dimension of the features, counted
    from the end; number of all features; this rank's). The mask is that part of the mask for all features."""
    stream: SequenceStream | None = None
    """Set if the input has only this rank's positions, as beside divided layers: the stream knows which they are."""
    _by_channel = False
    """True if one mask serves all positions of a channel."""

    def __init__(self, p: float = 0.5, inplace: bool = False, batch_dim: int = 0) -> None:
        super().__init__(p, inplace)
        self.batch_dim = batch_dim

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p in (0, 1):
            return super().forward(input)
        if torch.compiler.is_compiling():
            return self._compiled(input)
        scope = current()
        return self._torchs(input) if scope is None else self._exact(input, scope)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, batch_dim={self.batch_dim}"

    def _torchs(self, input: Tensor) -> Tensor:
        """Computes what the class of ``torch.nn`` computes in training."""
        return F.dropout(input, self.p, True, self.inplace)

    def _exact(self, input: Tensor, scope: Scope) -> Tensor:
        rows_first = input.movedim(self.batch_dim, 0)
        caller = self if self.layer is None else self.layer
        shape = list(self._mask_shape(rows_first))
        sequence = scope.sequence if self.stream is None else self.stream.now
        given = (self.p, caller, self.batch_dim, self._by_channel, scope, sequence)
        if self.part is None:
            return self._scaled(input, _factor(rows_first, shape, *given))
        dim, shape[dim], own = self.part
        return self._scaled(input, _factor(rows_first, shape, *given).narrow(dim, own.start, len(own)))

    def _compiled(self, input: Tensor) -> Tensor:
        """Computes the output inside a compiled graph, by a node that asks for the scope when it runs. A layer without
        a name breaks the graph; so does a layer between divided layers, which break it anyway."""
        if self.layer is None or self.part is not None or self.stream is not None:
            uncompiled: Tensor = self._uncompiled(input)
            return uncompiled
        rows_first = input.movedim(self.batch_dim, 0)
        shape = self._mask_shape(rows_first)
        factor: Tensor = _factor_node(
            rows_first.detach(), _ORDER_TOKEN, shape, self.p, self.layer, self.batch_dim, self._by_channel
        )
        return self._scaled(input, factor)

    @outside_of_graphs
    def _uncompiled(self, input: Tensor) -> Tensor:
        scope = current()
        return self._torchs(input) if scope is None else self._exact(input, scope)

    def _scaled(self, input: Tensor, factor: Tensor) -> Tensor:
        factor = factor.movedim(0, self.batch_dim)
        return input.mul_(factor) if self.inplace else input * factor

    def _mask_shape(self, input: Tensor) -> tuple[int, ...]:
        """Returns the shape of the mask for an input with samples first; dimensions of size 1 are broadcast."""
        return tuple(input.shape)


class Dropout1d(Dropout):
    """:class:`Dropout` that drops whole channels of an (N, C, L) input, as ``nn.Dropout1d``."""

    _by_channel = True
    _dims = 3
    _plain = staticmethod(F.dropout1d)

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__(p, inplace)

    def _torchs(self, input: Tensor) -> Tensor:
        return self._plain(input, self.p, True, self.inplace)

    def _mask_shape(self, input: Tensor) -> tuple[int, ...]:
        if input.dim() != self._dims:
            raise ConfigurationError(
                f"{type(self).__name__} takes {self._dims}-dimensional inputs, samples and channels first;"
                f" got shape {tuple(input.shape)}"
            )
        return (*input.shape[:2], *[1] * (self._dims - 2))


class Dropout2d(Dropout1d):
    """:class:`Dropout` that drops whole channels of an (N, C, H, W) input, as ``nn.Dropout2d``."""

    _dims = 4
    _plain = staticmethod(F.dropout2d)


def name_dropouts(model: M) -> M:
    """Sets the qualified name on each :class:`Dropout` of the model, so that masks do not depend on construction
    order. A compiled model gets the names, and so the masks, of the plain model.

    A module without a name is identified by the order of first calls in the step instead.
    """
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            module.layer = clean_name(name)
    return model


_CLASSES: dict[type[nn.Module], type[Dropout]] = {
    nn.Dropout: Dropout,
    nn.Dropout1d: Dropout1d,
    nn.Dropout2d: Dropout2d,
}


def exact_dropout(model: M, batch_dim: int = 0) -> M:
    """Replaces the model's dropouts by dropouts whose masks do not depend on the division of the batch.

    Args:
        model: Changed in place: ``nn.Dropout``, ``Dropout1d`` and ``Dropout2d`` change their class.
        batch_dim: The dimension of the samples in the input of each ``nn.Dropout``; 1 if positions come first.

    Returns:
        The same model, with the same modules and names.

    Warns:
        UserWarning: If modules go on drawing from a generator, with their names: other dropouts, and modules with a
            dropout rate that they pass to a function (``nn.MultiheadAttention``, ``nn.LSTM``, custom attention).
    """
    left = []
    for name, module in model.named_modules():
        if type(module) in _CLASSES:
            module.__class__ = _CLASSES[type(module)]
            if type(module) is Dropout:
                module.batch_dim = batch_dim
        elif not isinstance(module, Dropout):
            left += [
                f"{clean_name(name) or 'the model'} ({type(module).__name__}, {rate})"
                for rate in _rates(module)
            ]
    if left:
        warnings.warn(
            f"{len(left)} of the model's modules go on drawing masks that depend on the division: "
            f"{', '.join(left[:8])}{', ...' if len(left) > 8 else ''}. Set these rates to 0, or use evener.nn.Dropout",
            stacklevel=2,
        )
    return name_dropouts(model)


def drawing_apart(model: nn.Module) -> int:
    """Counts the modules with dropout whose masks depend on the division of the batch."""
    return sum(not isinstance(module, Dropout) and bool(_rates(module)) for module in model.modules())


def _rates(module: nn.Module) -> list[str]:
    """Returns the module's own dropout rates above 0, as "name=value"."""
    return [
        f"{name}={value}"
        for name, value in vars(module).items()
        if isinstance(value, float) and value > 0 and ("drop" in name or isinstance(module, AnyDropout))
    ]


def _factor(
    rows_first: Tensor,
    shape: Sequence[int],
    p: float,
    caller: str | nn.Module,
    batch_dim: int,
    by_channel: bool,
    scope: Scope,
    sequence: DividedSequence | None,
) -> Tensor:
    """Returns the mask: 0 or the scale for each element of ``shape``, in the dtype of ``rows_first``.

    ``caller`` is the name of the layer, or the layer itself if it has none.

    Raises:
        ConfigurationError: If the first dimension is no multiple of the number of samples, or positions are divided
            and do not follow the samples.
    """
    named, samples, rows = isinstance(caller, str), len(scope.samples), shape[0]
    if rows % samples if samples else rows:
        raise ConfigurationError(
            f"dropout {caller if named else ''}: dimension {batch_dim} of its input has size {rows}, no"
            f" multiple of the {samples} samples of the micro-batch; name the samples' dimension with"
            " batch_dim=, or use nn.Dropout, whose mask depends on the division"
        )
    if not rows:
        return rows_first.new_ones(tuple(shape))
    layer_key = _hash64(f"{caller if named else f'#{scope.order(caller)}'}/{scope.call(caller)}")
    threshold = min(max(1, round(p * 65536)), 65535)
    keys = _keys(scope, layer_key, rows_first.device)
    divided = None if by_channel else sequence
    runs = _elements(shape, samples, divided, str(caller) if named else "")
    kept = torch.cat([_draws(keys, run) for run in runs], 1) >= threshold - 32768
    return kept.view(tuple(shape)).to(rows_first.dtype).mul_(65536 / (65536 - threshold))


_ORDER_TOKEN = torch.zeros((), device="cpu")
"""Every dropout node declares that it writes to this tensor. So a compiler keeps the nodes in order and merges none,
which matters because calls of a layer are counted."""


# Declared nondeterministic, so that a compiler keeps the mask for backward and does not compute it again.
@library.custom_op(
    "evener::dropout_factor", mutates_args=("order_token",), tags=(torch.Tag.nondeterministic_seeded,)
)
def _factor_node(
    rows_first: Tensor,
    order_token: Tensor,
    shape: Sequence[int],
    p: float,
    layer: str,
    batch_dim: int,
    by_channel: bool,
) -> Tensor:
    scope = current()
    if scope is None:
        return F.dropout(rows_first.new_ones(tuple(shape)), p)
    return _factor(rows_first, shape, p, layer, batch_dim, by_channel, scope, scope.sequence)


@_factor_node.register_fake
def _(
    rows_first: Tensor,
    order_token: Tensor,
    shape: Sequence[int],
    p: float,
    layer: str,
    batch_dim: int,
    by_channel: bool,
) -> Tensor:
    return rows_first.new_empty(tuple(shape))


def _signed(value: int, bits: int = 64) -> int:
    """Returns the value modulo 2^bits as a two's complement number, as torch's integers wrap."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _shift_xor_(x: Tensor, shift: int) -> Tensor:
    """Computes ``x ^= x >>> shift`` in place; torch's shift of signed integers is arithmetic, hence the mask."""
    bits = x.element_size() * 8
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (bits - shift)) - 1))


def _splitmix64(x: Tensor) -> Tensor:
    """Applies the SplitMix64 finalizer to each int64."""
    x = x.clone()
    for shift, multiplier in _SPLITMIX:
        _shift_xor_(x, shift).mul_(_signed(multiplier))
    return _shift_xor_(x, 31)


def _keys(scope: Scope, layer_key: int, device: torch.device) -> Tensor:
    """Returns (n, 2) int32: the key of each sample for this seed, step, layer and call."""
    if device not in scope.keys:
        base = _hash64(f"{scope.seed}/{scope.step}")
        scope.keys[device] = _splitmix64(send(scope.samples, device) * _signed(_GOLDEN) + _signed(base))
    mixed = (scope.keys[device] ^ _signed(layer_key)).mul_(_signed(_SPLITMIX[0][1]))
    return _shift_xor_(mixed, 32).view(torch.int32).view(-1, 2)


def _elements(
    shape: Sequence[int], samples: int, sequence: DividedSequence | None, layer: str
) -> list[range]:
    """Returns the numbers of a sample's elements on this rank. If positions are divided, elements are numbered in the
    whole sequence.

    Divided positions must be dimension 1, or flattened with the samples into dimension 0.
    """
    each = torch.Size(shape).numel() // samples
    if sequence is None:
        return [range(each)]
    size = sequence.size
    if shape[0] != samples * size and [*shape[:2]] != [samples, size]:
        raise ConfigurationError(
            f"dropout {layer}: its input is of shape {tuple(shape)}, samples first; where the {sequence.length} "
            f"positions of a sequence are divided, dimension 1 must be the {size} of this rank, or dimension 0 both "
            "together"
        )
    width = each // size if size else 0
    return [range(chunk.start * width, chunk.stop * width) for chunk in sequence.local_positions]


@functools.lru_cache(maxsize=32)
def _counters(first: int, last: int, device: torch.device) -> Tensor:
    """Returns (last - first,) int32: hashes of these numbers, the same for every sample, layer and step."""
    return _splitmix64(torch.arange(first + 1, last + 1, device=device) * _signed(_GOLDEN)).to(torch.int32)


def _draws(keys: Tensor, elements: range) -> Tensor:
    """Returns (n, elements) int16, uniform over all values: a keyed hash of each element's number."""
    first, last = elements.start // 2, (elements.stop + 1) // 2
    words = _counters(first, last, keys.device) ^ keys[:, :1]
    words.mul_(_LOWBIAS[0])
    _shift_xor_(words, 16).add_(keys[:, 1:]).mul_(_signed(_LOWBIAS[1], bits=32))
    halves = _shift_xor_(words, 15).view(torch.int16)
    return halves[:, elements.start - 2 * first : elements.stop - 2 * first]
