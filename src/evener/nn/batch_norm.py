"""BatchNorm over the ranks of a group, or over other peers, each sample counted once, on any device.

``nn.SyncBatchNorm`` refuses CPU tensors, knows no placeholder, and converts modules into copies. Here a
model's own BatchNorm modules change their class in place (as ``fully_shard`` does), so parameters, buffers,
hooks, names and references to them stay.

Forward, a rank with ``n`` values a channel sends ``(n, mean, M2)`` with ``M2 = Σ(x - mean)²``, and all
combine what came, in order of rank, by the parallel formula of Chan, Golub and LeVeque ("Updating formulae
and a pairwise algorithm for computing sample variances", 1979), here for any number of parts::

    n = Σ n_r      mean = Σ n_r mean_r / n      M2 = Σ M2_r + Σ n_r (mean_r - mean)²

Backward, with ``x̂ = (x - mean) / σ``, one sum over the ranks of ``Σ dy`` and ``Σ dy x̂`` gives (Ioffe and
Szegedy, 2015)::

    dx = γ / σ · (dy - Σ dy / n - x̂ Σ dy x̂ / n)

Gradients of γ and β are the rank's own sums: the exchange of gradients adds them up like all others.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from evener.borrowed.layers import AnyBatchNorm
from evener.errors import ConfigurationError
from evener.hardware.readout import is_late
from evener.nn.peers import Peers, Ranks
from evener.nn.recomputing import once
from evener.nn.scope import current
from evener.nn.shared import Shared

M = TypeVar("M", bound=nn.Module)


class BatchNorm(AnyBatchNorm):
    """Batch normalization by the statistics of the micro-batch over all ranks of a group.

    Input is (N, C, ...) with any N, also 0, on each rank. Made from a module of ``torch.nn`` by
    :func:`exact_batch_norm`; without a group of several ranks it computes what that module did, which on a GPU
    makes the host wait in each step for cumulative averages (``momentum=None``); with one it does not. With batch
    statistics (training, or without running statistics) all ranks of the group must call it, those without
    samples on a placeholder in a scope of weight 0.
    """

    _ranks = Shared[Peers]()

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        group = self._ranks.value
        of_batch = self.training or self.running_mean is None
        if group is None or group.size() == 1 or not of_batch:
            return AnyBatchNorm.forward(self, input)
        output: Tensor = self._over_ranks(input, group)
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator] # a graph cannot wait for other ranks
    def _over_ranks(self, input: Tensor, group: Peers) -> Tensor:
        scope = current()
        counts = scope is None or scope.weight > 0
        statistics = once(lambda: _gather_statistics(input.detach(), counts, group))
        if self.training and self.track_running_stats:
            self._track(*statistics)
        arguments = (input, self.weight, self.bias, *statistics, self.eps, group, counts)
        output: Tensor = _Normalize.apply(*arguments)  # type: ignore[no-untyped-call]
        return output

    @torch.no_grad()
    def _track(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        """Moves the running statistics; the variance, as in ``torch.nn``, to that of an unbiased estimate."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        # Cumulative averages weigh by a number of the device, where it stays: the host would have to wait for it.
        momentum = self.momentum if self.momentum is not None else 1 / self.num_batches_tracked.double()
        unbiased = variance * (count / (count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.mul_(1 - momentum).add_((new * momentum).to(running.dtype))


class BatchNorm1d(BatchNorm, nn.BatchNorm1d):
    """:class:`BatchNorm` of (N, C) or (N, C, L)."""


class BatchNorm2d(BatchNorm, nn.BatchNorm2d):
    """:class:`BatchNorm` of (N, C, H, W)."""


class BatchNorm3d(BatchNorm, nn.BatchNorm3d):
    """:class:`BatchNorm` of (N, C, D, H, W)."""


class BatchNormNd(BatchNorm):
    """:class:`BatchNorm` of (N, C, ...), in place of ``nn.SyncBatchNorm``."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


_CLASSES: dict[type[nn.Module], type[BatchNorm]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
    nn.SyncBatchNorm: BatchNormNd,
}


def exact_batch_norm(model: M, group: ProcessGroup | Peers | None) -> M:
    """Makes the model's BatchNorm modules normalize over all ranks of the group.

    Args:
        model: Changed in place. Subclasses of torch's modules may compute something else; they are left, with
            a warning.
        group: The ranks whose micro-batches are normalized together, or other peers. A group of its own keeps its
            small messages out of the queue of the gradients'. None, or one rank, leaves plain BatchNorm.

    Returns:
        The same model, with the same parameters, buffers and names.

    Raises:
        ConfigurationError: If a lazy module does not know its number of features yet.
    """
    ranks = Shared[Peers](Ranks(group) if isinstance(group, ProcessGroup) else group)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.lazy.LazyModuleMixin) and isinstance(module, AnyBatchNorm):
            raise ConfigurationError(
                f"{name or 'the model'} is a {type(module).__name__} that has seen no input yet; call the"
                " model once on a sample before handing it over, or use a BatchNorm with num_features"
            )
        if type(module) in _CLASSES:
            module.__class__ = _CLASSES[type(module)]
        if isinstance(module, BatchNorm):
            module._ranks = ranks
        elif isinstance(module, AnyBatchNorm):
            warnings.warn(
                f"{name or 'the model'} is a {type(module).__name__}, which is not one of torch.nn's"
                " BatchNorm modules: its statistics stay those of each rank's own samples",
                stacklevel=2,
            )
    return model


def _gather_statistics(x: Tensor, counts: bool, group: Peers) -> tuple[Tensor, Tensor, Tensor]:
    """The count (0-d), mean (C,) and biased variance (C,) over all ranks, in double precision, the same bits
    on all.
    """
    channels = x.shape[1]
    n = x.numel() // max(1, channels) if counts else 0
    message = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    if n:
        variance, mean = torch.var_mean(_wide(x), [d for d in range(x.dim()) if d != 1], correction=0)
        message[0] = n
        message[1 : channels + 1] = mean
        message[channels + 1 :] = variance.double() * n
    count, mean, squares = _combine(group.all_gather(message))
    # If the total is at most one then so is every rank's n: all find it.
    variance = squares / count if n > 1 else _checked(squares / count, count, x, group)
    return count, mean, variance


def _checked(variance: Tensor, count: Tensor, x: Tensor, group: Peers) -> Tensor:
    """The variance of more than one value. Of fewer it is not a number where the host may not wait for the count, as
    on a GPU: nor is the loss of the step then, which ends the run before anything of it is saved.

    Raises:
        ValueError: If there are fewer and the count is at hand.
    """
    if is_late(count.device):
        return variance.masked_fill(count <= 1, math.nan)
    if count.item() <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {int(count)} over {group.size()}"
            f" {group.what} (input of size {tuple(x.shape)} here)"
        )
    return variance


def _combine(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From (ranks, 1 + 2C) counts, means and M2 of the parts, those of the whole."""
    channels = parts.shape[1] // 2
    counts, means, squares = torch.split(parts, [1, channels, channels], dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    return count, mean, (squares + counts * (means - mean) ** 2).sum(0)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _with_fixed_statistics(
    dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``γ/σ dy`` (as x), ``Σ dy x̂`` (C,) and ``Σ dy`` (C,) over this rank, in one pass."""
    if not x.numel():  # torch's CPU kernel divides by the size
        return torch.empty_like(x), torch.zeros_like(scale), torch.zeros_like(scale)
    direct, dy_xhat, dy_sum = torch.ops.aten.native_batch_norm_backward(
        dy, x, scale, mean, variance, None, None, False, eps, [True, True, True]
    )
    return direct, dy_xhat, dy_sum


class _Normalize(torch.autograd.Function):
    """``γ (x - mean) / σ + β`` with mean and σ that depend on the ``x`` of all ranks.

    Both directions are torch's own fused kernels for *given* statistics (``training=False``), which run on
    CPU and CUDA, keep the memory format and take half-precision inputs with float32 parameters.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        count: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        group: Peers,
        counts: bool,
    ) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        mean, variance = mean.to(dtype), variance.to(dtype)
        scale = torch.ones_like(mean) if weight is None else weight.to(dtype)
        ctx.save_for_backward(x, scale, count, mean, variance)
        ctx.eps, ctx.group, ctx.counts = eps, group, counts
        ctx.dtypes = tuple(None if p is None else p.dtype for p in (weight, bias))
        shift = torch.zeros_like(mean) if bias is None else bias.to(dtype)
        return F.batch_norm(x, mean, variance, scale, shift, training=False, momentum=0.0, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, count, mean, variance = ctx.saved_tensors
        direct, dy_xhat, dy_sum = _with_fixed_statistics(dy, x, scale, mean, variance, ctx.eps)
        dx = None
        if ctx.needs_input_grad[0]:
            sums = ctx.group.all_reduce(torch.cat([dy_xhat, dy_sum]).double())
            a, b = (sums / count).to(scale.dtype).view(2, -1) * (scale / torch.sqrt(variance + ctx.eps))
            # Through the statistics: γ/σ (x̂ Σ dy x̂ + Σ dy) / n, a normalization with other parameters. A
            # placeholder is no part of them.
            dx = direct - ctx.counts * F.batch_norm(
                x, mean, variance, a, b, training=False, momentum=0.0, eps=ctx.eps
            )
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            dx,
            dy_xhat.to(weight_dtype) if weight_dtype else None,
            dy_sum.to(bias_dtype) if bias_dtype else None,
            *[None] * 6,
        )
