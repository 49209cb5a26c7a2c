"""Dropout whose mask belongs to the sample, not to the device that happens to compute it.

A generator's state tells how much was drawn before, and so depends on the division of the batch. Here every
element of the mask is a function of (seed, step, sample, layer, call, element): a counter-based generator in
the sense of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), made of torch's integer
operations alone, which wrap around alike on CPU and CUDA.

The key of a sample and layer comes from SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", 2014) on n numbers. The mask itself is large and uses 32 bits: the counter's hash, keyed
twice, through the multiplications and shifts of ``lowbias32`` (Wellons, "Prospecting for hash functions",
2018). Each word decides two elements with 16 bits each, so ``p`` acts rounded to a multiple of 2⁻¹⁶, and the
scale that keeps the expectation is that of the rounded ``p``.
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
from evener.nn.sequence_parallel import Stream
from evener.torch_internals.compiling import outside_of_graphs
from evener.torch_internals.layers import AnyDropout

M = TypeVar("M", bound=nn.Module)

_GOLDEN = 0x9E3779B97F4A7C15
_SPLITMIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LOWBIAS = (0x7FEB352D, 0x846CA68B)


class Dropout(nn.Dropout):
    """``nn.Dropout`` whose mask does not depend on the division of the batch.

    Inside Evener's training step, the entries of ``batch_dim`` are the samples of the micro-batch, or equal
    runs of them as in (samples * tokens, features). A sample's mask depends on its own shape, so that samples
    padded to different lengths keep theirs only if the padded dimension comes first. Anywhere else, and in
    evaluation, this is ``nn.Dropout``.

    Args:
        p: Probability of an element to be zeroed, rounded to a multiple of 2⁻¹⁶ (at least one, unless it is
            0).
        inplace: Writes the result over the input.
        batch_dim: The dimension of the samples.
    """

    layer: str | None = None
    """The qualified name of the module in its model, by which masks of different layers differ
    (:func:`name_dropouts`).
    """
    batch_dim: int = 0
    part: tuple[int, int, range] | None = None
    """Where the input is a part of the features, as between divided layers: their dimension, counted from the end, how
    many there are, and which these are. Their mask is that part of the mask of all."""
    stream: Stream | None = None
    """Where the input is some of the positions, beside divided layers: what tells which."""
    _by_channel = False
    """Whether the mask is one for all positions."""

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
        """What the module of ``torch.nn`` computes in training."""
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
        """The same as a node of a graph, which asks for the scope when it runs; a layer without a
        name breaks it, and so does one between divided layers, which break it themselves."""
        if self.layer is None or self.part is not None or self.stream is not None:
            uncompiled: Tensor = self._uncompiled(input)
            return uncompiled
        rows_first = input.movedim(self.batch_dim, 0)
        shape = self._mask_shape(rows_first)
        factor: Tensor = _factor_node(
            rows_first.detach(), _TURN, shape, self.p, self.layer, self.batch_dim, self._by_channel
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
        """The shape of the mask for an input with samples first; ones are broadcast."""
        return tuple(input.shape)


class Dropout1d(Dropout):
    """:class:`Dropout` of whole channels of an (N, C, L) input, as ``nn.Dropout1d``."""

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
    """:class:`Dropout` of whole channels of an (N, C, H, W) input, as ``nn.Dropout2d``."""

    _dims = 4
    _plain = staticmethod(F.dropout2d)


def name_dropouts(model: M) -> M:
    """Tells each of the model's :class:`Dropout` its qualified name, so that masks do not depend on the order
    of construction; a compiled model has the names, and so the masks, of the plain one.

    A module that was never named goes by the place of its first call among those of the step.
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
    """Makes the model's dropouts those whose masks do not depend on the division of the batch.

    Args:
        model: Changed in place: ``nn.Dropout``, ``Dropout1d`` and ``Dropout2d`` change their class.
        batch_dim: The dimension of the samples in what each ``nn.Dropout`` gets; 1 for sequences that come first.

    Returns:
        The same model, with the same modules and names.

    Warns:
        UserWarning: With the names of modules that go on drawing from a generator: other dropouts, and modules with a
            rate that they hand to a function (``nn.MultiheadAttention``, ``nn.LSTM``, attention of one's own).
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
    """The number of modules that drop, but not by sample."""
    return sum(not isinstance(module, Dropout) and bool(_rates(module)) for module in model.modules())


def _rates(module: nn.Module) -> list[str]:
    """The attributes that say how much the module itself drops, if anything."""
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
    """0 or the scale for each element of a mask of ``shape``, in the dtype of ``rows_first``.

    ``caller`` is the name of the layer, or the layer itself if it has none.
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
    threshold = max(1, round(p * 65536))
    keys = _keys(scope, layer_key, rows_first.device)
    divided = None if by_channel else sequence
    runs = _elements(shape, samples, divided, str(caller) if named else "")
    kept = torch.cat([_draws(keys, run) for run in runs], 1) >= threshold - 32768
    return kept.view(tuple(shape)).to(rows_first.dtype).mul_(65536 / (65536 - threshold))


_TURN = torch.zeros((), device="cpu")
"""Every node is said to write to it, so that a compiler keeps them in order and makes no two of them one: which call of
its layer a node is, it knows by counting."""


# Nondeterministic for the compiler, so that backward keeps the mask and does not draw it anew.
@library.custom_op(
    "evener::dropout_factor", mutates_args=("turn",), tags=(torch.Tag.nondeterministic_seeded,)
)
def _factor_node(
    rows_first: Tensor,
    turn: Tensor,
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
    turn: Tensor,
    shape: Sequence[int],
    p: float,
    layer: str,
    batch_dim: int,
    by_channel: bool,
) -> Tensor:
    return rows_first.new_empty(tuple(shape))


def _signed(value: int, bits: int = 64) -> int:
    """The value modulo 2^bits as a two's complement number, which is how torch's integers wrap."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _shift_xor_(x: Tensor, shift: int) -> Tensor:
    """``x ^= x >>> shift`` in place; torch's shift of signed integers is arithmetic, hence the mask."""
    bits = x.element_size() * 8
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (bits - shift)) - 1))


def _splitmix64(x: Tensor) -> Tensor:
    """The SplitMix64 finalizer of each int64."""
    x = x.clone()
    for shift, multiplier in _SPLITMIX:
        _shift_xor_(x, shift).mul_(_signed(multiplier))
    return _shift_xor_(x, 31)


def _keys(scope: Scope, layer_key: int, device: torch.device) -> Tensor:
    """(n, 2) int32: the key of each sample in this layer, call, step and run."""
    if device not in scope.keys:
        base = _hash64(f"{scope.seed}/{scope.step}")
        scope.keys[device] = _splitmix64(send(scope.samples, device) * _signed(_GOLDEN) + _signed(base))
    mixed = (scope.keys[device] ^ _signed(layer_key)).mul_(_signed(_SPLITMIX[0][1]))
    return _shift_xor_(mixed, 32).view(torch.int32).view(-1, 2)


def _elements(
    shape: Sequence[int], samples: int, sequence: DividedSequence | None, layer: str
) -> list[range]:
    """The numbers of a sample's elements at hand, in the whole sequence where this rank has a piece of it.

    Its positions must come right after the samples, or together with them in dimension 0.
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
    return [range(chunk.start * width, chunk.stop * width) for chunk in sequence.own]


@functools.lru_cache(maxsize=32)
def _counters(first: int, last: int, device: torch.device) -> Tensor:
    """(last - first,) int32: hashes of these numbers, the same for every sample, layer and step."""
    return _splitmix64(torch.arange(first + 1, last + 1, device=device) * _signed(_GOLDEN)).to(torch.int32)


def _draws(keys: Tensor, elements: range) -> Tensor:
    """(n, elements) int16, uniform over all its values: a keyed hash of the number of the element."""
    first, last = elements.start // 2, (elements.stop + 1) // 2
    words = _counters(first, last, keys.device) ^ keys[:, :1]
    words.mul_(_LOWBIAS[0])
    _shift_xor_(words, 16).add_(keys[:, 1:]).mul_(_signed(_LOWBIAS[1], bits=32))
    halves = _shift_xor_(words, 15).view(torch.int16)
    return halves[:, elements.start - 2 * first : elements.stop - 2 * first]
