"""Means and squares of a layer's input, and a normalization by given ones, at the speed of the memory.

On a CPU, ``torch.var_mean`` over (0, 2, 3) of an image takes 30 times as long as adding it up, and torch's own kernel
for BatchNorm's statistics 10 times. Here all is sums and products over the whole input, taken sample by sample in
pieces that stay in a core's cache, so that what lies between two of them costs no memory::

    mean of x                 Σ x / n, a first one in the input's precision
    piece by piece            d = x - mean      Σ d      Σ d²
    corrected                 mean + Σ d / n    M2 = Σ d² - (Σ d)² / n

The correction (Chan, Golub and LeVeque, 1983) makes good what the rounding of the first mean did, so that a large mean
costs the variance no digit. For the same reason what is normalized is ``x - near`` with a ``near`` of the input's
precision, and what the true mean is beyond it goes into the offset.

Other devices have kernels of torch's that read the input once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

_PIECE_NBYTES = 256 * 1024


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (C,) and ``Σ (x - mean)²`` (C,) of (N, C, ...) in double precision; of one value or more a channel."""
    others = [d for d in range(x.dim()) if d != 1]
    n = x.numel() // x.shape[1]
    if not _by_pieces(x):
        variance, mean = torch.var_mean(x.to(wide(x.dtype)), others, correction=0)
        return mean.double(), variance.double() * n
    near = x.mean(others, dtype=wide(x.dtype))
    sums = torch.zeros(2, x.shape[1], dtype=torch.float64)
    for (part,) in _pieces(x):
        difference = part - _along(near, x)
        sums[0] += difference.sum(others)
        sums[1] += difference.square_().sum(others)
    beyond = sums[0] / n
    return near.double().add_(beyond), sums[1].sub_(beyond * sums[0]).clamp_(min=0)


class Given:
    """Given statistics of a micro-batch, and what of them goes into a normalization of (N, C, ...).

    Args:
        dtype: What is computed in.
        mean: (C,) in double precision, as the variance.
    """

    def __init__(self, dtype: torch.dtype, mean: Tensor, variance: Tensor, eps: float) -> None:
        self.mean, self.variance, self.eps, self.dtype = mean, variance, eps, dtype
        self.near = mean.to(dtype)
        self.beyond = mean - self.near
        self.inverse = (variance + eps).rsqrt()

    def normalize(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """``γ (x - mean) / σ + β``, in type and memory format as ``x``."""
        scale = self._scale(weight)
        offset = -self.beyond * scale if bias is None else bias - self.beyond * scale
        if not _by_pieces(x):
            return self._fused(x, weight, offset)
        y = torch.empty_like(x)
        near, scale, offset = (_along(each.to(self.dtype), x) for each in (self.near, scale, offset))
        for part, out in _pieces(x, y):
            if x.dtype == self.dtype:
                torch.sub(part, near, out=out).mul_(scale).add_(offset)
            else:
                out.copy_((part - near).mul_(scale).add_(offset))
        return y

    def _scale(self, weight: Tensor | None) -> Tensor:
        return self.inverse if weight is None else self.inverse * weight

    def _fused(self, x: Tensor, weight: Tensor | None, offset: Tensor) -> Tensor:
        """``weight (x - near) / σ + offset`` by torch's kernel, which takes halves with parameters of float32."""
        weight = torch.ones_like(self.near) if weight is None else weight.to(self.dtype)
        variance = self.variance.to(self.dtype)
        return F.batch_norm(x, self.near, variance, weight, offset.to(self.dtype), False, 0.0, self.eps)

    def sums(self, dy: Tensor, x: Tensor) -> Tensor:
        """``Σ dy x̂`` and ``Σ dy``, one behind the other (2C,), in double precision."""
        if not x.numel():  # torch's CPU kernel divides by the size
            return torch.zeros(2 * len(self.mean), dtype=torch.float64, device=x.device)
        near, variance = self.near, self.variance.to(self.dtype)
        _, products, sums = torch.ops.aten.native_batch_norm_backward(
            dy, x, near, near, variance, None, None, False, self.eps, [False, True, True]
        )
        sums = sums.double()
        return torch.cat([products.double() - self.beyond * self.inverse * sums, sums])

    def direct(self, dy: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
        """``γ/σ dy``, what the gradient of ``x`` would be if the statistics were constants."""
        return torch.mul(dy, _along(self._scale(weight).to(self.dtype), x), out=torch.empty_like(x))

    def through_statistics(self, dx: Tensor, x: Tensor, weight: Tensor | None, means: Tensor) -> None:
        """Takes ``γ/σ (x̂ Σ dy x̂ / n + Σ dy / n)`` from ``dx``; ``means`` (2C,) holds the two quotients."""
        of_xhat, constant = (means.view(2, -1) * self._scale(weight)).unbind()
        slope = of_xhat * self.inverse
        offset = constant - slope * self.beyond
        if not _by_pieces(x):
            dx.sub_(self._fused(x, of_xhat, offset))
            return
        near, slope, offset = (_along(each.to(self.dtype), x) for each in (self.near, -slope, -offset))
        for part, out in _pieces(x, dx):
            if x.dtype == self.dtype:
                out.addcmul_(part - near, slope).add_(offset)
            else:
                out.copy_((part - near).mul_(slope).add_(offset).add_(out))


def _by_pieces(x: Tensor) -> bool:
    """Whether memory is what takes the time, and not the number of operations."""
    return x.device.type == "cpu"


def _along(of_channels: Tensor, x: Tensor) -> Tensor:
    """(C,) as (C, 1, ...), to go with the channels of ``x``."""
    return of_channels.view(-1, *[1] * (x.dim() - 2))


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Runs of samples of tensors of one shape, so few that they stay in a core's cache."""
    first = tensors[0]
    if first.nbytes <= _PIECE_NBYTES:
        yield tensors
        return
    samples = max(1, math.floor(_PIECE_NBYTES * len(first) / first.nbytes))
    yield from zip(*(torch.split(tensor, samples) for tensor in tensors), strict=True)
