"""BatchNorm by the statistics of each grain, for runs that are exact in bits.

A grain is normalized by its own samples, so that its outputs depend on no other grain. (Hoffer and others, "Train
longer, generalize better", 2017, call it ghost batch normalization.) This is another model than BatchNorm over the
batch. The running statistics follow the mean over all grains of the batch, weighted by their elements::

    mean = Σ e_i m_i / Σ e_i        variance = Σ e_i v_i / Σ e_i        one update a step

Ranks add the terms of their grains. So that no order matters, each term is first rounded to a multiple of ``unit``, a
power of two, in float64, for which all sums are exact: they are below ``max |e m| * n < 2^50 * unit``, with the number
of terms ``n`` and the largest term known from all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.errors import TaskError
from evener.nn.batch_norm_kernels import by_running_statistics
from evener.nn.context import current
from evener.nn.recompute_guard import once
from evener.torch_internals.modules import AnyBatchNorm

Gather = Callable[[Tensor], Tensor]
"""Gathers a vector from every rank: ``(n,)`` becomes ``(ranks, n)``. All ranks must call it together."""
Add = Callable[[Tensor], Tensor]
"""Adds up a vector over all ranks. All ranks must call it together."""
_BITS_OF_SUM = 50


class GrainNorm(AnyBatchNorm):
    """Normalizes by the statistics of the current grain, and keeps these for the running statistics."""

    is_exact = False
    """It does not normalize over ranks."""
    terms: list[Tensor]
    """For each grain so far: the elements of a channel, and these times the means and times the variances; float64."""
    _name = "a BatchNorm"

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if not (self.training or self.running_mean is None):
            return AnyBatchNorm.forward(self, input)
        scope = current()
        if scope is not None and not scope.weight:
            return by_running_statistics(self, input)
        elements = input.numel() // max(1, input.shape[1])
        if elements == 1:
            raise TaskError(
                f"batch_norm=grain: {self._name} has a single value in a channel of a grain, of which there is no "
                "variance; choose grain so that every grain, also the last one of an epoch, has at least 2 samples"
            )
        if self.running_mean is None:
            return AnyBatchNorm.forward(self, input)
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_mean)
        # With momentum 1 the "running" statistics become those of the grain.
        output = F.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        if scope is not None:
            once(lambda: self._keep(elements, mean, variance))
        return output

    def _keep(self, elements: int, mean: Tensor, variance: Tensor) -> None:
        moments = torch.stack([mean, variance]).double().flatten() * elements
        self.terms.append(torch.cat([moments.new_full((1,), elements), moments]))

    @torch.no_grad()
    def follow(self, summed: Tensor) -> None:
        """Updates the running statistics by the sum of all terms. Does nothing if there were none."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        seen = summed[0] > 0
        self.num_batches_tracked.add_(seen.to(self.num_batches_tracked.dtype))
        momentum = 1 / self.num_batches_tracked.double() if self.momentum is None else self.momentum
        for running, total in zip((self.running_mean, self.running_var), summed[1:].chunk(2), strict=True):
            change = (total / summed[0] - running.double()) * momentum
            running.copy_(torch.where(seen, running.double() + change, running.double()))


class GrainNorm1d(GrainNorm, nn.BatchNorm1d):
    """:class:`GrainNorm` for (N, C) or (N, C, L)."""


class GrainNorm2d(GrainNorm, nn.BatchNorm2d):
    """:class:`GrainNorm` for (N, C, H, W)."""


class GrainNorm3d(GrainNorm, nn.BatchNorm3d):
    """:class:`GrainNorm` for (N, C, D, H, W)."""


class GrainNormNd(GrainNorm):
    """:class:`GrainNorm` for (N, C, ...), in place of ``nn.SyncBatchNorm``."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


_CLASSES: dict[type[nn.Module], type[GrainNorm]] = {
    nn.BatchNorm1d: GrainNorm1d,
    nn.BatchNorm2d: GrainNorm2d,
    nn.BatchNorm3d: GrainNorm3d,
    nn.SyncBatchNorm: GrainNormNd,
}


def normalize_by_grains(model: nn.Module) -> list[GrainNorm]:
    """Makes the model's BatchNorm modules normalize each grain by itself, and returns them. Changes their class in
    place; subclasses of torch's modules stay as they are."""
    found = []
    for name, module in model.named_modules():
        if type(module) in _CLASSES:
            changed: Any = module
            changed.__class__ = _CLASSES[type(module)]
            changed.terms, changed._name = [], name or "the model"
            found.append(changed)
    return found


def update_running_statistics(norms: list[GrainNorm], gather: Gather, add: Add, device: torch.device) -> None:
    """Updates the running statistics of all modules after the last grain of a step. A collective call.

    Args:
        norms: The model's modules, in the same order on all ranks.
    """
    if not norms:
        return
    own = [_terms_of(norm, device) for norm in norms]
    known = gather(torch.stack([_known(terms) for terms in own]).flatten()).view(-1, len(norms), 2)
    most, numbers = known[..., 0].amax(0), known[..., 1].sum(0)
    units = torch.ldexp(torch.ones_like(most), torch.frexp(most * numbers).exponent - _BITS_OF_SUM)
    added = add(torch.cat([_on_grid(terms, unit) for terms, unit in zip(own, units, strict=True)]))
    parts = torch.split(added, [terms.shape[1] for terms in own])
    for norm, summed in zip(norms, parts, strict=True):
        norm.follow(summed)
        norm.terms.clear()


def _terms_of(norm: GrainNorm, device: torch.device) -> Tensor:
    """Returns the terms of this rank's grains, ``(grains, 1 + 2 * channels)``."""
    if norm.terms:
        return torch.stack(norm.terms)
    return torch.zeros((0, 1 + 2 * norm.num_features), dtype=torch.float64, device=device)


def _known(terms: Tensor) -> Tensor:
    """Returns the largest magnitude of the terms, and their number."""
    most = terms.abs().amax() if len(terms) else terms.new_zeros(())
    return torch.stack([most, most.new_full((), len(terms))])


def _on_grid(terms: Tensor, unit: Tensor) -> Tensor:
    """Returns the sum of the terms, each rounded to a multiple of ``unit``."""
    rounding = 1.5 * 2.0**52 * unit
    return ((terms + rounding) - rounding).sum(0)
