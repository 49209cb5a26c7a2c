"""Merges the buffers of the replicas at the end of a round.

The running moments of BatchNorm merge as those of all samples together, by the law of total variance. With ``n_i``
samples, a mean ``m_i`` and a variance ``v_i`` of replica ``i``, and ``N = Σ n_i``,

    mean = Σ n_i m_i / N        variance = Σ n_i (v_i + (m_i - mean)²) / N

A mean of the variances alone would lose how far the means lie apart. PyTorch keeps unbiased variances, those of ``e``
elements times ``e / (e - 1)``, so the factor of a replica's own batches is taken out before and that of all replicas'
batches together put in after.

Of other buffers that a pass has changed, floating-point ones get the mean by samples, and those of other types the
value of the first replica that had samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.hardware.timers import waiting
from evener.strategies.learner import Learner
from evener.strategies.local_steps.merge import widest
from evener.strategies.local_steps.replicas import LocalReplica, ReplicaSet
from evener.torch_internals.modules import AnyBatchNorm, own_buffers


class BufferMerge:
    """Merges buffers over all replicas. All ranks must call its methods together.

    Args:
        group: The ranks that carry other replicas. None if this rank carries all.
    """

    def __init__(self, learner: Learner, replicas: ReplicaSet, group: dist.ProcessGroup | None) -> None:
        self._model, self._replicas, self._group = learner.model, replicas, group
        self._device, self._wide = learner.session.device, widest(learner.session.device)
        self._before: list[Tensor] = []

    def begin(self) -> None:
        """Keeps the buffers of the start of a round."""
        self._before = [buffer.clone() for _, _, buffer in self._replicas.owned_buffers()]

    @torch.no_grad()
    def merge(self, shares: Sequence[int]) -> None:
        """Gives the model the merged buffers.

        Args:
            shares: The number of samples of each replica in the round.
        """
        if not self._before:
            return
        held = self._replicas.owned_buffers()
        now = [buffer for _, _, buffer in held]
        of_all = [
            (each, now if each is self._replicas.current else each.buffers or self._before)
            for each in self._replicas.all
        ]
        places = {(id(owner), name): place for place, (owner, name, _) in enumerate(held)}
        normalized = [
            (
                module,
                [places[id(own), name] for name in ("running_mean", "running_var")],
                places.get((id(own), _COUNT)),
            )
            for module in self._model.modules()
            if isinstance(module, AnyBatchNorm)
            and (own := own_buffers(module)).get("running_mean") is not None
        ]
        of_norms = {place for _, pair, count in normalized for place in (*pair, count)}
        others = self._changed([place for place in range(len(now)) if place not in of_norms], of_all)
        samples, first = sum(shares), next(at for at, share in enumerate(shares) if share)
        sums = self._summed(
            [
                *(self._norm(module, pair, count, of_all) for module, pair, count in normalized),
                *(self._other(place, of_all, first) for place in others),
            ]
        )
        for (_, (mean, variance), count), summed in zip(normalized, sums, strict=False):
            elements, batches, *moments = torch.split(summed, [1, 1, *[now[mean].numel()] * 2])
            if not elements:
                continue  # it has normalized by its running moments, which have not changed
            middle, squares = (moment / samples for moment in moments)
            factor = elements / (elements - 1) if elements > 1 else 1.0
            now[mean].copy_(middle.view_as(now[mean]))
            now[variance].copy_(((squares - middle.square()).clamp_min(0) * factor).view_as(now[variance]))
            if count is not None:
                now[count].copy_((self._before[count] + batches.round()).reshape(now[count].shape))
        for place, summed in zip(others, sums[len(normalized) :], strict=True):
            target = _real(now[place])
            found = summed / samples if now[place].is_floating_point() or now[place].is_complex() else summed
            target.copy_(found.view_as(target))

    def _changed(self, places: Sequence[int], of_all: OfAll) -> list[int]:
        """Returns the buffers that a pass has changed on any rank."""
        if not places:
            return []
        flags = [any(not torch.equal(each[at], self._before[at]) for _, each in of_all) for at in places]
        agreed = torch.tensor(flags, dtype=torch.uint8, device=self._device)
        if self._group is not None:
            with waiting():
                dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._group)
        return [place for place, is_changed in zip(places, agreed.tolist(), strict=True) if is_changed]

    def _norm(self, module: nn.Module, pair: list[int], count: int | None, of_all: OfAll) -> Tensor:
        """Returns this rank's sums for one BatchNorm: elements, batches, means and squares."""
        mean, variance = pair
        length = self._before[mean].numel()
        total = torch.zeros(2 + 2 * length, dtype=self._wide, device=self._device)
        for replica, buffers in of_all:
            elements, passes = replica.normalized.get(module, (0, 0))
            each = elements / passes if passes else 0.0
            own_mean = buffers[mean].to(self._device, self._wide).flatten()
            own_variance = buffers[variance].to(self._device, self._wide).flatten()
            biased = own_variance * ((each - 1) / each if each > 1 else 1.0)
            total[0] += each
            total[1] += 0.0 if count is None else float(buffers[count] - self._before[count])
            total[2 : 2 + length] += replica.samples * own_mean
            total[2 + length :] += replica.samples * (biased + own_mean.square())
        return total

    def _other(self, place: int, of_all: OfAll, first: int) -> Tensor:
        """Returns this rank's sum for another buffer: of all values by samples, or the value of the first replica."""
        like = _real(self._before[place])
        total = torch.zeros(like.numel(), dtype=self._wide, device=self._device)
        is_mean = like.is_floating_point()
        for replica, buffers in of_all:
            weight = replica.samples if is_mean else int(replica.index == first)
            if weight:
                total += weight * _real(buffers[place]).to(self._device, self._wide).flatten()
        return total

    def _summed(self, own: list[Tensor]) -> list[Tensor]:
        """Returns the sums over all ranks."""
        if not own:
            return []
        flat = torch.cat(own)
        if self._group is not None:
            with waiting():
                dist.all_reduce(flat, group=self._group)
        return list(torch.split(flat, [each.numel() for each in own]))


OfAll = list[tuple[LocalReplica, list[Tensor]]]
"""The replicas of this rank, each with its buffers."""
_COUNT = "num_batches_tracked"


def _real(tensor: Tensor) -> Tensor:
    """Returns complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
