"""Merges the buffers of the replicas at the end of a round.

The running moments of BatchNorm merge as those of all samples together (:mod:`evener.strategies.running_moments`). Of
other buffers that a pass has changed, floating-point ones get the mean by samples, and those of other types the value
of the first part that had samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from evener.core.complex_numbers import as_real
from evener.data.rounds import Rounds
from evener.hardware.timers import waiting
from evener.strategies.learner import Learner
from evener.strategies.local_steps.merge import widest
from evener.strategies.local_steps.replicas import LocalReplica, ReplicaSet
from evener.strategies.running_moments import RunningMoments, running_moments


class BufferMerge:
    """Merges buffers over all replicas. All ranks must call its methods together.

    Args:
        group: All ranks. None if this one is alone.
        team: The ranks that compute a replica together. None if each computes its replicas alone.
    """

    def __init__(
        self,
        learner: Learner,
        replicas: ReplicaSet,
        group: dist.ProcessGroup | None,
        team: dist.ProcessGroup | None,
        rounds: Rounds,
    ) -> None:
        self._model, self._replicas, self._group = learner.model, replicas, group
        self._team, self._rounds = team, rounds
        self._like = torch.empty(0, dtype=widest(learner.session.device), device=learner.session.device)
        self._before: list[Tensor] = []

    def begin(self) -> None:
        """Keeps the buffers of the start of a round."""
        self._before = [buffer.clone() for _, _, buffer in self._replicas.owned_buffers()]

    @torch.no_grad()
    def merge(self, shares: Sequence[int]) -> None:
        """Gives the model the merged buffers.

        Args:
            shares: The number of samples of each part in the round.
        """
        if not self._before:
            return
        held = self._replicas.owned_buffers()
        now = [buffer for _, _, buffer in held]
        of_all = [
            (each, now if each is self._replicas.current else each.buffers or self._before)
            for each in self._replicas.all
        ]
        moments = running_moments(self._model, held)
        of_norms = {place for each in moments for place in each.places}
        others = self._changed([place for place in range(len(now)) if place not in of_norms], of_all)
        samples, first = sum(shares), next(at for at, share in enumerate(shares) if share)
        sums = self._summed(
            [
                *(self._norm(each, of_all, shares) for each in moments),
                *(self._other(place, of_all, first) for place in others),
            ]
        )
        for each, summed in zip(moments, sums, strict=False):
            before = 0.0 if each.count is None else float(self._before[each.count])
            each.write(now, before, summed, samples)
        for place, summed in zip(others, sums[len(moments) :], strict=True):
            target = as_real(now[place])
            found = summed / samples if now[place].is_floating_point() or now[place].is_complex() else summed
            target.copy_(found.view_as(target))

    def _changed(self, places: Sequence[int], of_all: OfAll) -> list[int]:
        """Returns the buffers that a pass has changed on any rank."""
        if not places:
            return []
        flags = [any(not torch.equal(each[at], self._before[at]) for _, each in of_all) for at in places]
        agreed = torch.tensor(flags, dtype=torch.uint8, device=self._like.device)
        if self._group is not None:
            with waiting():
                dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._group)
        return [place for place, is_changed in zip(places, agreed.tolist(), strict=True) if is_changed]

    def _norm(self, moments: RunningMoments, of_all: OfAll, shares: Sequence[int]) -> Tensor:
        """Returns this rank's sum for one BatchNorm. One that normalizes over a team is alike on its ranks, and
        counts on the first of them."""
        at, rows = moments.count, []
        together = self._team is not None and getattr(moments.module, "is_exact", False)
        for replica, buffers in of_all:
            batches = 0.0 if at is None else float(buffers[at] - self._before[at])
            counted: Sequence[float] = replica.normalized.get(moments.module, (0, 0))
            samples = replica.samples
            if together:
                elements = self._like.new_tensor(counted[:1])
                with waiting():
                    dist.all_reduce(elements, group=self._team)
                counted, samples = (
                    (elements.item(), counted[1]),
                    sum(self._rounds.of_team(shares, replica.index)),
                )
            row = moments.summand(buffers, batches, samples, counted, self._like)
            rows.append(row if self._rounds.leads or not together else torch.zeros_like(row))
        return torch.stack(rows).sum(dim=0)

    def _other(self, place: int, of_all: OfAll, first: int) -> Tensor:
        """Returns this rank's sum for another buffer: of all values by samples, or the value of the first part."""
        like = as_real(self._before[place])
        total = self._like.new_zeros(like.numel())
        is_mean = like.is_floating_point()
        for replica, buffers in of_all:
            weight = replica.samples if is_mean else int(self._rounds.part_of(replica.index) == first)
            if weight:
                total += weight * as_real(buffers[place]).to(total.device, total.dtype).flatten()
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
