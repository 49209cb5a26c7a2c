"""Fast kernels for BatchNorm: mean and sum of squares of an input, and normalization by given statistics.

On a CPU, ``torch.var_mean`` over (0, 2, 3) of an image takes 30 times as long as a sum over it, and torch's own kernel
for BatchNorm statistics 10 times as long. The kernels here use only sums and products. They work on runs of samples
that fit into a core's cache, so that intermediate results do not go to memory::

    mean of x                 Σ x / n, a first mean in the input's precision
    piece by piece            d = x - mean      Σ d      Σ d²
    corrected                 mean + Σ d / n    M2 = Σ d² - (Σ d)² / n

The correction (Chan, Golub and LeVeque, 1983) undoes the rounding of the first mean, so that a large mean does not cost
the variance any digits. For the same reason the kernels normalize ``x - near``, where ``near`` is the mean rounded to
the input's precision, and put the rest of the mean into the offset.

On other devices, torch's kernels read the input only once, and are used.

Values per channel are few, so that operations on them mostly cost their start. NumPy operations start in a third of the
time of torch's. So on a CPU these values are NumPy arrays in double precision, elsewhere tensors; the code is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from evener.torch_internals.modules import AnyBatchNorm

_PIECE_NBYTES = 2**20
_SHORT = 256
"""Up to this many contiguous values per sample and channel, torch's sums are slow."""

Channels = Any
"""Values per channel: a NumPy array on a CPU, else a tensor; see :func:`light`."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the type to compute in: ``dtype``, but at least float32."""
    return torch.promote_types(dtype, torch.float32)


def light(of_channels: Tensor) -> Channels:
    """Returns a NumPy array on the same memory for a plain CPU tensor, any other tensor as it is. Must not be called on
    parameters (see `_readable`)."""
    if of_channels.device.type == "cpu" and type(of_channels) is Tensor:
        return of_channels.numpy()
    return of_channels


def heavy(of_channels: Channels, dtype: torch.dtype) -> Tensor:
    """Converts the result of :func:`light` back to a tensor, of ``dtype``."""
    tensor = torch.from_numpy(of_channels) if isinstance(of_channels, np.ndarray) else of_channels
    return tensor.to(dtype)


def moments(x: Tensor) -> tuple[Channels, Channels]:
    """Returns mean (C,) and ``Σ (x - mean)²`` (C,) of (N, C, ...) in double precision. ``x`` must not be empty."""
    others = [d for d in range(x.dim()) if d != 1]
    n = x.numel() // x.shape[1]
    if not _by_pieces(x):
        variance, mean = torch.var_mean(x.to(wide(x.dtype)), others, correction=0)
        return light(mean.double()), light(variance.double() * n)
    near = x.mean(others, dtype=wide(x.dtype))
    found = [_sums(piece, others) for piece in _shifted(x, _along(near, x))]
    difference, square = (_added(parts) for parts in zip(*found, strict=True))
    beyond = difference / n
    return light(near.double()) + beyond, square - beyond * difference


def by_running_statistics(norm: AnyBatchNorm, x: Tensor) -> Tensor:
    """Normalizes by the running statistics of ``norm``, as in evaluation, and does not update them. Without running
    statistics, mean and variance count as 0 and 1.

    It is for placeholders, which may have a single value per channel, for which batch statistics do not exist.
    """
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None:
        mean = x.new_zeros(x.shape[1], dtype=wide(x.dtype))
        variance = torch.ones_like(mean)
    return F.batch_norm(x, mean, variance, norm.weight, norm.bias, False, 0.0, norm.eps)


def _sums(piece: Tensor, others: list[int]) -> tuple[Tensor, Tensor]:
    """Returns ``Σ d`` and ``Σ d²`` for each channel of ``piece``, which may be overwritten."""
    if 1 < piece[0, 0].numel() <= _SHORT and piece.is_contiguous():
        # torch's kernel for the gradient sums dy and dy x̂; called with dy = x̂ = d it gives both sums. It reads the
        # memory once, and adds up runs in double precision.
        zero, one = piece.new_zeros(piece.shape[1]), piece.new_ones(piece.shape[1])
        _, squares, sums = torch.ops.aten.native_batch_norm_backward(
            piece, piece, one, zero, one, None, None, False, 0.0, [False, True, True]
        )
        return sums, squares
    return piece.sum(others), piece.square_().sum(others)


def _shifted(x: Tensor, near: Tensor) -> Iterator[Tensor]:
    """Yields ``x - near`` in runs of samples, each in the memory of the run before."""
    memory: Tensor | None = None
    for (part,) in _pieces(x):
        if memory is None:
            memory = part - near
            yield memory
        else:
            yield torch.sub(part, near, out=memory[: len(part)])


def _added(parts: Iterable[Tensor]) -> Channels:
    first, *rest = parts
    total = light(first.double())
    for part in rest:
        total += light(part)
    return total


class Given:
    """Normalizes (N, C, ...) by given statistics, forward and backward.

    Args:
        dtype: The type to compute in.
        mean: (C,) in double precision.
        variance: (C,) in double precision.
        eps: Added to the variance.
        weight: (C,) or None, as in ``torch.nn``.
    """

    def __init__(
        self, dtype: torch.dtype, mean: Channels, variance: Channels, eps: float, weight: Tensor | None
    ) -> None:
        self.eps, self.dtype = eps, dtype
        self._mean, self._variance = mean, variance
        self._near = heavy(mean, dtype)
        self._beyond = mean - light(self._near)
        self._inverse = 1 / (variance + eps) ** 0.5
        self._weight = weight
        self._scale = self._inverse if weight is None else self._inverse * _readable(weight)

    def normalize(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns ``γ (x - mean) / σ + β``, in the type and memory format of ``x``."""
        offset = -self._beyond * self._scale if bias is None else _readable(bias) - self._beyond * self._scale
        if not _by_pieces(x):
            return self._fused(x, self._weight, offset)
        y = torch.empty_like(x)
        near, scale, offset = self._along(x, self._near, self._scale, offset)
        for part, out in _pieces(x, y):
            if x.dtype == self.dtype:
                torch.sub(part, near, out=out).mul_(scale).add_(offset)
            else:
                out.copy_((part - near).mul_(scale).add_(offset))
        return y

    def sums(self, dy: Tensor, x: Tensor) -> Tensor:
        """Returns ``Σ dy x̂`` and ``Σ dy``, concatenated (2C,), in double precision."""
        channels = x.shape[1]
        found = torch.zeros(2 * channels, dtype=torch.float64, device=x.device)
        if not x.numel():  # torch's CPU kernel divides by the size
            return found
        variance = heavy(self._variance, self.dtype)
        # CUDA's kernel reads the statistics saved by a training pass, the CPU's kernel the running ones.
        saved = (None, None) if _by_pieces(x) else (self._near, heavy(self._inverse, self.dtype))
        _, products, sums = torch.ops.aten.native_batch_norm_backward(
            dy, x, self._near, self._near, variance, *saved, False, self.eps, [False, True, True]
        )
        both, sums = light(found), light(sums.double())
        both[:channels] = light(products) - self._beyond * self._inverse * sums
        both[channels:] = sums
        return found

    def direct(self, dy: Tensor, x: Tensor) -> Tensor:
        """Returns ``γ/σ dy``: the gradient of ``x`` if the statistics were constants."""
        (scale,) = self._along(x, self._scale)
        return torch.mul(dy, scale, out=torch.empty_like(x))

    def through_statistics(self, dx: Tensor, x: Tensor, sums: Tensor, n: Channels) -> None:
        """Subtracts ``γ/σ (x̂ Σ dy x̂ / n + Σ dy / n)`` from ``dx``, in place. ``sums`` (2C,) and the number of values
        per channel ``n`` are those of all ranks."""
        of_xhat, constant = light(sums).reshape(2, -1) * (self._scale / n)
        slope = of_xhat * self._inverse
        offset = constant - slope * self._beyond
        if not _by_pieces(x):
            dx.sub_(self._fused(x, of_xhat, offset))
            return
        near, slope, offset = self._along(x, self._near, -slope, -offset)
        pieces = zip(_shifted(x, near), _pieces(dx), strict=True)
        for difference, (out,) in pieces:
            if x.dtype == self.dtype:
                out.addcmul_(difference, slope).add_(offset)
            else:
                out.copy_(difference.mul_(slope).add_(offset).add_(out))

    def _along(self, x: Tensor, *of_channels: Channels) -> list[Tensor]:
        return [_along(heavy(each, self.dtype), x) for each in of_channels]

    def _fused(self, x: Tensor, weight: Channels | None, offset: Channels) -> Tensor:
        """Returns ``weight (x - near) / σ + offset`` by torch's kernel, which accepts a float16 or bfloat16 ``x`` with
        float32 parameters."""
        weight = torch.ones_like(self._near) if weight is None else heavy(weight, self.dtype)
        variance, offset = (heavy(each, self.dtype) for each in (self._variance, offset))
        return F.batch_norm(x, self._near, variance, weight, offset, False, 0.0, self.eps)


def _readable(parameter: Tensor) -> Channels:
    """Returns a float64 copy of a parameter. It is a copy because memory that NumPy has seen cannot be freed by
    ``resize_``, which FSDP2 calls on gathered weights."""
    return light(parameter.detach().to(torch.float64, copy=True))


def _by_pieces(x: Tensor) -> bool:
    """Returns True on a CPU, where memory bandwidth limits the speed and not the number of operations."""
    return x.device.type == "cpu"


def _along(of_channels: Tensor, x: Tensor) -> Tensor:
    """Views (C,) as (C, 1, ...), to broadcast along the channels of ``x``."""
    return of_channels.view(-1, *[1] * (x.dim() - 2))


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Splits tensors of one shape into runs of samples that fit into a core's cache."""
    first = tensors[0]
    if first.nbytes <= _PIECE_NBYTES:
        yield tensors
        return
    samples = max(1, math.floor(_PIECE_NBYTES * len(first) / first.nbytes))
    yield from zip(*(torch.split(tensor, samples) for tensor in tensors), strict=True)
