"""BatchNorm over the ranks of a group (or other peers), on any device; each sample counts once.

``nn.SyncBatchNorm`` refuses CPU tensors, does not support placeholder samples, and replaces modules by copies. Here
the model's own BatchNorm modules change their class in place (as ``fully_shard`` does), so their parameters,
buffers, hooks and names, and references to them, stay.

Forward: a rank with ``n`` values per channel sends ``(n, mean, M2)`` with ``M2 = Σ(x - mean)²``. All ranks combine
the received values in order of rank, by the parallel formula of Chan, Golub and LeVeque ("Updating formulae and a
pairwise algorithm for computing sample variances", 1979), here for any number of parts::

    n = Σ n_r      mean = Σ n_r mean_r / n      M2 = Σ M2_r + Σ n_r (mean_r - mean)²

Backward: with ``x̂ = (x - mean) / σ``, one all-reduce of ``Σ dy`` and ``Σ dy x̂`` gives (Ioffe and Szegedy, 2015)::

    dx = γ / σ · (dy - Σ dy / n - x̂ Σ dy x̂ / n)

The gradients of γ and β are the rank's own sums; gradient synchronization adds them up as it does all others.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from evener.errors import ConfigurationError
from evener.hardware.async_read import is_late
from evener.nn.batch_norm_kernels import (
    Channels,
    Given,
    by_running_statistics,
    heavy,
    light,
    moments,
    wide,
)
from evener.nn.batch_norm_peers import PeerRanks, Peers
from evener.nn.collectives import mapped
from evener.nn.context import current
from evener.nn.recompute_guard import once
from evener.nn.second_derivatives import differentiable_gradients
from evener.nn.unowned import Shared
from evener.torch_internals.compiling import outside_of_graphs
from evener.torch_internals.modules import AnyBatchNorm

M = TypeVar("M", bound=nn.Module)


class BatchNorm(AnyBatchNorm):
    """Batch normalization by the statistics of the micro-batch over all ranks of a group.

    Input is (N, C, ...) with any N on each rank, also 0. :func:`exact_batch_norm` makes it from a module of
    ``torch.nn``. With batch statistics (in training, or without running statistics) all ranks of the group must call
    it together; a rank without samples calls it on a placeholder, in a scope of weight 0.

    Without a group of several ranks it computes what the module of ``torch.nn`` does. With cumulative averages
    (``momentum=None``) that makes the host wait for the GPU in each step; with a group it does not.
    """

    _ranks = Shared[Peers]()
    is_exact = True
    """True if it normalizes over the samples of all ranks; False after :func:`local_batch_norm`."""
    _name = "a BatchNorm"
    """The module's name in the model, for error messages."""

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        group = self._ranks.value
        of_batch = self.training or self.running_mean is None
        if not self.is_exact and of_batch and _is_placeholder():
            return by_running_statistics(self, input)
        if group is None or group.size() == 1 or not of_batch:
            return AnyBatchNorm.forward(self, input)
        output: Tensor = self._over_ranks(input, group)
        return output

    @outside_of_graphs  # a graph cannot wait for other ranks
    def _over_ranks(self, input: Tensor, group: Peers) -> Tensor:
        scope = current()
        if scope is None and group.is_by_batches:
            alone: Tensor = AnyBatchNorm.forward(self, input)
            return alone
        counts = scope is None or scope.weight > 0
        count, mean, variance, copies, own = once(
            lambda: _gather_statistics(input.detach(), counts, group, self._name)
        )
        if self.training and self.track_running_stats:
            self._track(count / copies, mean, variance)
        given = Given(wide(input.dtype), mean, variance, self.eps, self.weight)
        meeting = _StatisticsExchange(group, self._name, count, counts, own)
        output: Tensor = _Normalize.apply(input, self.weight, self.bias, given, meeting)  # type: ignore[no-untyped-call]
        return output

    @torch.no_grad()
    def _track(self, count: Channels, mean: Channels, variance: Channels) -> None:
        """Updates the running statistics; for the variance with the unbiased estimate, as ``torch.nn`` does."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        # The count of batches stays on the device, so that the host does not wait for it.
        momentum = self.momentum if self.momentum is not None else 1 / self.num_batches_tracked.double()
        unbiased = variance * (count / (count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.add_((heavy(new, running.dtype) - running) * momentum)


class BatchNorm1d(BatchNorm, nn.BatchNorm1d):
    """:class:`BatchNorm` for (N, C) or (N, C, L)."""


class BatchNorm2d(BatchNorm, nn.BatchNorm2d):
    """:class:`BatchNorm` for (N, C, H, W)."""


class BatchNorm3d(BatchNorm, nn.BatchNorm3d):
    """:class:`BatchNorm` for (N, C, D, H, W)."""


class BatchNormNd(BatchNorm):
    """:class:`BatchNorm` for (N, C, ...), in place of ``nn.SyncBatchNorm``."""

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
        model: Changed in place. Subclasses of torch's modules may compute something else; they stay as they are, with
            a warning.
        group: The ranks whose micro-batches are normalized together, or other peers. Use a process group that carries
            no gradients, so that the small messages do not wait behind these. With None or a single rank, modules
            compute plain BatchNorm.

    Returns:
        The same model, with the same parameters, buffers and names.

    Raises:
        ConfigurationError: If a lazy module has not seen an input yet.
    """
    ranks = Shared[Peers](PeerRanks(group) if isinstance(group, ProcessGroup) else group)
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
    """Makes the model's BatchNorm modules normalize over their own rank's samples only, also after
    :func:`exact_batch_norm`. For a placeholder (in a scope of weight 0) they compute as in evaluation.
    """
    for module in model.modules():
        _make_own(module)
        if isinstance(module, BatchNorm):
            module.is_exact, module._ranks = False, Shared[Peers]()


def normalize_by_batches(model: nn.Module) -> None:
    """Makes the model's BatchNorm modules communicate only inside a scope, in which the batch is divided over ranks.

    Passes that a user's training loop runs outside of a scope are the same on all ranks, so that nothing needs to be
    exchanged. Inside a scope, inputs that are bitwise the same on all ranks count once.
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
) -> tuple[Channels, Channels, Channels, Channels | int, Tensor]:
    """Returns the count (0-d), mean (C,) and biased variance (C,) over all ranks, in float64, bitwise the same on all
    ranks; the number of ranks whose values are copies of each other (see :func:`_copies`), else 1; and this rank's own
    count (1,), that of a copy also where its samples do not count.

    Raises:
        ValueError: On a CPU, if there are fewer than two values per channel.
    """
    n = x.numel() // max(1, x.shape[1]) if counts else 0
    message = _row(x) if n else torch.zeros(2 * x.shape[1] + 1, dtype=torch.float64, device=x.device)
    parts = group.all_gather_later(message, f"{name}, forward")()
    # If the total is at most one, so is every rank's n: all ranks run the check and raise.
    if n <= 1 and not is_late(x.device):
        _check(parts, x, group)
    count, mean, squares = _combine(light(parts))
    variance = squares / count
    copies = light(_copies(parts)) if group.is_by_batches else 1
    own = message[:1]
    if group.is_by_batches and not counts and x.numel():
        row = _row(x)
        own = torch.where(_copies(torch.cat([parts, row[None]])) > parts[:, 0].count_nonzero(), row[:1], 0.0)
    variance = variance.masked_fill(count <= 1, math.nan) if is_late(x.device) else variance
    return count, mean, variance, copies, own


def _row(x: Tensor) -> Tensor:
    """Returns a rank's count, means and ``Σ (x - mean)²`` (1 + 2C,), in double precision. ``x`` must not be empty."""
    channels = x.shape[1]
    row = torch.empty(2 * channels + 1, dtype=torch.float64, device=x.device)
    numbers = light(row)
    numbers[0] = x.numel() // channels
    numbers[1 : channels + 1], numbers[channels + 1 :] = moments(x)
    return row


def _copies(parts: Tensor) -> Tensor:
    """Returns the number of rows with samples if all of them have the same values (an input that is not a share of a
    batch), else 1. Does not wait for a device. Copies change neither mean nor variance, but do change the unbiased
    estimate of the variance."""
    counts = parts[:, 0] > 0
    first = parts.index_select(0, counts.to(torch.uint8).argmax().view(1))
    are_same = ((parts == first).all(1) | ~counts).all() & (first[0, 0] > 1)
    return torch.where(are_same, counts.sum(), 1)


def _check(parts: Tensor, x: Tensor, group: Peers) -> None:
    """Raises ValueError if there are fewer than two values per channel. It is not called for a GPU, as the host must
    not wait for the count. There the variance is NaN instead, and so is the loss, which ends the run before it saves.
    """
    count = int(parts[:, 0].sum())
    if count <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {count} over {group.size()}"
            f" {group.what} (input of size {tuple(x.shape)} here)"
        )


def _combine(parts: Channels) -> tuple[Channels, Channels, Channels]:
    """Combines count, means and M2 of each rank, (ranks, 1 + 2C), into those of all samples."""
    channels = parts.shape[1] // 2
    counts, means, squares = parts[:, :1], parts[:, 1 : channels + 1], parts[:, channels + 1 :]
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    return count, mean, (squares + counts * (means - mean) ** 2).sum(0)


class _StatisticsExchange(NamedTuple):
    """The data that backward needs to exchange its sums with the other ranks."""

    peers: Peers
    name: str
    """The name of the layer."""
    values: Channels
    """Number of values per channel over all ranks (0-d)."""
    counts: bool
    """True if this rank's samples count, False for a placeholder."""
    own: Tensor
    """The number of this rank's values per channel, (1,). 0 for a placeholder, unless its values are a copy of those
    that all others have."""

    def partaking(self, dy: Tensor) -> Tensor | bool:
        """Returns whether this rank is part of a backward pass with the gradient ``dy``. A placeholder is if it is a
        copy, as in a pass on data that all ranks have, and a loss gives it a gradient."""
        if self.counts or not self.peers.is_by_batches:
            return self.counts
        size = dy.detach().abs().sum()
        return (self.own > 0) & (size > 0) & size.isfinite()


class _Normalize(torch.autograd.Function):
    """Computes ``γ (x - mean) / σ + β``, where mean and σ depend on the ``x`` of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        given: Given,
        meeting: _StatisticsExchange,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)  # weights are saved so that autograd notices changes of them
        ctx.given, ctx.meeting = given, meeting
        ctx.dtypes = tuple(None if p is None else p.dtype for p in (weight, bias))
        return given.normalize(x, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        given: Given = ctx.given
        if torch.is_grad_enabled():
            return (*_differentiable_backward(ctx, x, weight, bias, dy), None, None)
        sums, dx = given.sums(dy, x), None
        is_part = ctx.meeting.partaking(dy)
        dy, sums = _if_part(is_part, dy), _if_part(is_part, sums)
        if ctx.needs_input_grad[0]:
            dx = _gradient(ctx.meeting, given, dy, x, sums, is_part)
        dy_xhat, dy_sum = sums.view(2, -1)
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            dx,
            dy_xhat.to(weight_dtype) if weight_dtype else None,
            dy_sum.to(bias_dtype) if bias_dtype else None,
            None,
            None,
        )


def _if_part(is_part: Tensor | bool, values: Tensor) -> Tensor:
    """Returns ``values``, or zeros if the rank is no part: 0 times a placeholder's gradient may be NaN."""
    if isinstance(is_part, Tensor):
        return torch.where(is_part, values, 0.0)
    return values if is_part else torch.zeros_like(values)


def _gradient(
    meeting: _StatisticsExchange, given: Given, dy: Tensor, x: Tensor, sums: Tensor, is_part: Tensor | bool
) -> Tensor:
    by_batches, values = meeting.peers.is_by_batches, meeting.values
    message = torch.cat([sums, _if_part(is_part, meeting.own)]) if by_batches else sums.clone()
    later = meeting.peers.all_reduce_later(message, f"{meeting.name}, backward")
    dx = given.direct(dy, x)  # needs no answer of the other ranks
    totals = later()
    if by_batches:
        totals, values = totals[:-1], light(totals[-1])
    if is_part is not False:  # a placeholder is no part of the statistics
        given.through_statistics(dx, x, totals, values)
    return _if_part(is_part, dx)


def _differentiable_backward(
    ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Computes what backward does by operations that autograd knows, for gradients of gradients."""
    meeting: _StatisticsExchange = ctx.meeting
    is_part, name = meeting.partaking(dy), f"{meeting.name}, gradients of gradients"
    if meeting.peers.is_by_batches:
        count = meeting.peers.all_reduce_later(_if_part(is_part, meeting.own).clone(), name)()
    else:
        count = torch.as_tensor(meeting.values, dtype=torch.float64, device=x.device)
    others = [d for d in range(x.dim()) if d != 1]
    along = [1, -1, *[1] * (x.dim() - 2)]

    def mean(values: Tensor) -> Tensor:
        def total(sums: Tensor) -> Tensor:
            return meeting.peers.all_reduce_later(sums.clone(), name)()

        if is_part is not True:  # it takes part in the message, and in nothing else
            hidden = values.new_ones((), dtype=torch.bool) if is_part is False else ~is_part
            values = values.masked_fill(hidden, 0)
        return mapped(values.sum(others), total, total) / count

    def normalized(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        precise = x.double()
        centered = precise - mean(precise).view(along)
        y: Tensor = centered * (mean(centered**2) + ctx.given.eps).rsqrt().view(along)
        y = y if weight is None else y * weight.double().view(along)
        y = y if bias is None else y + bias.double().view(along)
        return y.to(x.dtype)

    dy = _if_part(is_part, dy)
    return differentiable_gradients(normalized, (x, weight, bias), ctx.needs_input_grad, dy)
