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
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from evener.errors import ConfigurationError
from evener.hardware.async_read import is_late
from evener.nn.batch_norm_kernels import Channels, Given, heavy, light, moments, wide
from evener.nn.batch_norm_peers import Peers, Ranks
from evener.nn.context import current
from evener.nn.recompute_guard import once
from evener.nn.unowned import Shared
from evener.torch_internals.compiling import outside_of_graphs
from evener.torch_internals.layers import AnyBatchNorm

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
    is_exact = True
    """Whether it is meant for the samples of all ranks; False after :func:`local_batch_norm`."""
    _name = "a BatchNorm"
    """In the model, for errors."""

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        group = self._ranks.value
        of_batch = self.training or self.running_mean is None
        if not self.is_exact and of_batch and _is_placeholder():
            return self._by_what_is_known(input)
        if group is None or group.size() == 1 or not of_batch:
            return AnyBatchNorm.forward(self, input)
        output: Tensor = self._over_ranks(input, group)
        return output

    def _by_what_is_known(self, input: Tensor) -> Tensor:
        """As in evaluation, for a placeholder, which may be a single value and must leave no trace."""
        mean, variance = self.running_mean, self.running_var
        if mean is None or variance is None:
            mean = input.new_zeros(input.shape[1], dtype=wide(input.dtype))
            variance = torch.ones_like(mean)
        return F.batch_norm(input, mean, variance, self.weight, self.bias, False, 0.0, self.eps)

    @outside_of_graphs  # a graph cannot wait for other ranks
    def _over_ranks(self, input: Tensor, group: Peers) -> Tensor:
        scope = current()
        if scope is None and group.is_by_batches:
            alone: Tensor = AnyBatchNorm.forward(self, input)
            return alone
        counts = scope is None or scope.weight > 0
        count, mean, variance, copies = once(
            lambda: _gather_statistics(input.detach(), counts, group, self._name)
        )
        if self.training and self.track_running_stats:
            self._track(count / copies, mean, variance)
        given = Given(wide(input.dtype), mean, variance, self.eps, self.weight)
        meeting = _Meeting(group, self._name, count, counts)
        output: Tensor = _Normalize.apply(input, self.weight, self.bias, given, meeting)  # type: ignore[no-untyped-call]
        return output

    @torch.no_grad()
    def _track(self, count: Channels, mean: Channels, variance: Channels) -> None:
        """Moves the running statistics; the variance, as in ``torch.nn``, to that of an unbiased estimate."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        # Cumulative averages weigh by a number of the device, where it stays: the host would have to wait for it.
        momentum = self.momentum if self.momentum is not None else 1 / self.num_batches_tracked.double()
        unbiased = variance * (count / (count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.add_((heavy(new, running.dtype) - running) * momentum)


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
        _make_own(module)
        if isinstance(module, BatchNorm) and module.is_exact:
            module._ranks, module._name = ranks, name or "the model"
        elif isinstance(module, AnyBatchNorm) and not isinstance(module, BatchNorm):
            warnings.warn(
                f"{name or 'the model'} is a {type(module).__name__}, which is not one of torch.nn's"
                " BatchNorm modules: its statistics stay those of each rank's own samples",
                stacklevel=2,
            )
    return model


def local_batch_norm(model: nn.Module) -> None:
    """Makes the model's BatchNorm modules normalize by the samples of their rank alone, also after
    :func:`exact_batch_norm`. In a scope of weight 0 they compute as in evaluation.
    """
    for module in model.modules():
        _make_own(module)
        if isinstance(module, BatchNorm):
            module.is_exact, module._ranks = False, Shared[Peers]()


def normalize_by_batches(model: nn.Module) -> None:
    """Makes the model's BatchNorm modules normalize over other ranks within a scope only, where a batch is divided.

    What a loop of the user's computes outside of one is the same on all ranks, and is counted once; so is what is the
    same on all ranks within one, to the bit.
    """
    for module in model.modules():
        if isinstance(module, BatchNorm) and module._ranks.value is not None:
            module._ranks.value.is_by_batches = True


def _make_own(module: nn.Module) -> None:
    if type(module) in _CLASSES:
        module.__class__ = _CLASSES[type(module)]


@outside_of_graphs  # a graph would keep the answer of its first call
def _is_placeholder() -> bool:
    scope = current()
    return scope is not None and scope.weight == 0


def _gather_statistics(
    x: Tensor, counts: bool, group: Peers, name: str
) -> tuple[Channels, Channels, Channels, Channels | int]:
    """The count (0-d), mean (C,) and biased variance (C,) over all ranks, in double precision, the same bits
    on all; and how often the same values are in it.
    """
    channels = x.shape[1]
    n = x.numel() // max(1, channels) if counts else 0
    message = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    if n:
        numbers = light(message)
        numbers[0] = n
        numbers[1 : channels + 1], numbers[channels + 1 :] = moments(x)
    parts = group.all_gather_later(message, f"{name}, forward")()
    # If the total is at most one then so is every rank's n: all find it.
    if n <= 1 and not is_late(x.device):
        _check(parts, x, group)
    count, mean, squares = _combine(light(parts))
    variance = squares / count
    copies = light(_copies(parts)) if group.is_by_batches else 1
    return count, mean, variance.masked_fill(count <= 1, math.nan) if is_late(x.device) else variance, copies


def _copies(parts: Tensor) -> Tensor:
    """How many ranks have counted, if all of them have the same values, as of an input that is no share of a batch;
    else 1. No wait for a device. Copies change neither mean nor variance, but the estimate of an unbiased one."""
    counts = parts[:, 0] > 0
    first = parts.index_select(0, counts.to(torch.uint8).argmax().view(1))
    are_same = ((parts == first).all(1) | ~counts).all() & (first[0, 0] > 1)
    return torch.where(are_same, counts.sum(), 1)


def _check(parts: Tensor, x: Tensor, group: Peers) -> None:
    """Raises ValueError if there are fewer than two values a channel. Where the host may not wait for the count, as on
    a GPU, the variance is not a number then: nor is the loss of the step, which ends the run before it is saved.
    """
    count = int(parts[:, 0].sum())
    if count <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {count} over {group.size()}"
            f" {group.what} (input of size {tuple(x.shape)} here)"
        )


def _combine(parts: Channels) -> tuple[Channels, Channels, Channels]:
    """From (ranks, 1 + 2C) counts, means and M2 of the parts, those of the whole."""
    channels = parts.shape[1] // 2
    counts, means, squares = parts[:, :1], parts[:, 1 : channels + 1], parts[:, channels + 1 :]
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    return count, mean, (squares + counts * (means - mean) ** 2).sum(0)


class _Meeting(NamedTuple):
    """Where backward meets the others."""

    peers: Peers
    name: str
    """Of the layer."""
    values: Channels
    """Values a channel over all of them (0-d)."""
    counts: bool
    """Whether this rank's are among these."""


class _Normalize(torch.autograd.Function):
    """``γ (x - mean) / σ + β`` with mean and σ that depend on the ``x`` of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, given: Given, meeting: _Meeting
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.given, ctx.meeting = given, meeting
        ctx.dtypes = tuple(None if p is None else p.dtype for p in (weight, bias))
        return given.normalize(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, _ = ctx.saved_tensors  # the weight for autograd to see that it has not changed
        given: Given = ctx.given
        sums, dx = given.sums(dy, x), None
        if not ctx.meeting.counts:  # 0 times a placeholder's gradient may be NaN
            dy, sums = torch.zeros_like(dy), torch.zeros_like(sums)
        if ctx.needs_input_grad[0]:
            dx = _gradient(ctx.meeting, given, dy, x, sums)
        dy_xhat, dy_sum = sums.view(2, -1)
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            dx,
            dy_xhat.to(weight_dtype) if weight_dtype else None,
            dy_sum.to(bias_dtype) if bias_dtype else None,
            None,
            None,
        )


def _gradient(meeting: _Meeting, given: Given, dy: Tensor, x: Tensor, sums: Tensor) -> Tensor:
    later = meeting.peers.all_reduce_later(sums.clone(), f"{meeting.name}, backward")
    dx = given.direct(dy, x)  # which needs nothing of the others
    totals = later()
    if meeting.counts:  # a placeholder is no part of the statistics
        given.through_statistics(dx, x, totals, meeting.values)
    return dx
