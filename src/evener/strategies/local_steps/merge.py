"""Merges the weights of the replicas: the mean of their differences, weighted by the terms that each has trained on.

Replica ``i`` has gone from the merged weights ``w`` to ``w_i``. With ``n_i`` terms of the loss (tokens, or labels that
are not ignored) behind it,

    difference = Σ n_i (w - w_i) / Σ n_i

is a gradient to an *outer* optimizer, which takes one step with it from ``w``. Plain SGD with a rate of 1 makes the
weighted mean of the weights (local SGD); Nesterov's momentum makes DiLoCo (Douillard et al., 2023, arXiv:2311.08105).

A fragment of the model may be sent some batches before it merges, while training goes on, and may keep a part ``alpha``
of what its replica has (Streaming DiLoCo, Douillard et al., 2025, arXiv:2501.18512).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.collectives.base import AllReduce, Work, key_of
from evener.components.coalesce import broadcast_together, in_buckets
from evener.components.gradients import number_of
from evener.components.sharded_tensor.local import as_held, local
from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.core.complex_numbers import as_real
from evener.hardware.profile_ranges import named_range
from evener.hardware.timers import waiting
from evener.strategies.learner import Learner
from evener.strategies.local_steps.replicas import ReplicaSet


@dataclass
class MergeGroup:
    """Ranks that merge together."""

    group: dist.ProcessGroup | None
    """None if this rank merges alone."""
    all_reduce: AllReduce | None
    _told_nbytes: int = 0

    def newly_sent(self) -> int:
        """Returns the bytes that this rank has put into sums since the last call."""
        before = self._told_nbytes
        self._told_nbytes = self.all_reduce.sent_nbytes if self.all_reduce is not None else 0
        return self._told_nbytes - before

    def close(self) -> None:
        """Frees the resources of the all-reduce."""
        if self.all_reduce is not None:
            self.all_reduce.close()


@dataclass(frozen=True)
class SentFragment:
    """The differences of a fragment, on their way over the ranks."""

    buckets: list[list[nn.Parameter]]
    flats: list[Tensor]
    """For each bucket the sum of the weighted differences."""
    numbers: Tensor
    """The sum of the weights, and the weighted sum of the differences' squares."""
    work: list[Work | dist.Work]
    over: MergeGroup


def widest(device: torch.device) -> torch.dtype:
    """Returns the widest type of floating-point numbers that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def summed_numbers(own: list[float], group: dist.ProcessGroup | None, device: torch.device) -> list[float]:
    """Returns the sums of numbers over the ranks of a group, which must call this together. None is this rank alone."""
    if group is None:
        return own
    summed = torch.tensor(own, dtype=widest(device), device=device)
    with waiting():
        dist.all_reduce(summed, group=group)
    return list(summed.tolist())


class Merge:
    """Merges fragments of the model.

    Args:
        everyone: All ranks that hold the same weights.
        unit: The number of terms that counts as the weight 1. Keeps numbers in the range of half precision.
        alpha: The part of a replica's own weights that stays in a merge.
        others: The ranks that hold other parts of this rank's replica. None if this one holds all of it.
    """

    def __init__(
        self,
        learner: Learner,
        replicas: ReplicaSet,
        outer: torch.optim.Optimizer,
        everyone: MergeGroup,
        unit: float,
        alpha: float,
        others: dist.ProcessGroup | None = None,
    ) -> None:
        self._learner, self._replicas, self._outer = learner, replicas, outer
        self._everyone, self._others = everyone, others
        self._unit, self._alpha = unit, alpha
        self._sent: dict[int, SentFragment] = {}
        self.sent_nbytes = 0
        """Bytes of differences that this rank has put into the merges of the round, after compression."""
        self.spreads: list[float] = []
        """For each merge of the round: how far the replicas were from their mean, as a multiple of its length."""

    @property
    def words(self) -> str:
        """A description of the all-reduce."""
        all_reduce = self._everyone.all_reduce
        return all_reduce.words if all_reduce else "none: one rank"

    @torch.no_grad()
    def send(self, fragment: int, parameters: list[nn.Parameter], over: MergeGroup) -> None:
        """Starts to sum the differences of a fragment over the ranks of ``over``, which must call this together."""
        trained = [p for p in parameters if p.requires_grad and local(p).numel()]
        weights = [(replica.terms - replica.sent[fragment]) / self._unit for replica in self._replicas.all]
        for replica in self._replicas.all:
            replica.sent[fragment] = replica.terms
        device = self._learner.session.device
        has_terms = True
        if over.all_reduce is not None and over.all_reduce.remembers:
            # What it kept of the merge before is of a mean, and belongs to a mean: this one may have fewer terms.
            (whole,) = summed_numbers([sum(weights)], over.group, device)
            has_terms, weights = whole > 0, [weight / (whole or 1.0) for weight in weights]
        squares = torch.zeros((), dtype=widest(device), device=device)
        buckets = list(in_buckets(trained, self._learner.settings.bucket_nbytes, local))
        flats = [self._weighted(bucket, weights, squares) for bucket in buckets]
        numbers = torch.stack([torch.tensor(sum(weights), dtype=widest(device), device=device), squares])
        work: list[Work | dist.Work] = []
        if over.all_reduce is not None:
            with waiting(), named_range("merge of fragment", fragment):
                pairs = zip(flats, buckets, strict=True) if has_terms else ()
                work = [over.all_reduce(flat, key_of(bucket)) for flat, bucket in pairs]
                summed = dist.all_reduce(numbers, group=over.group, async_op=True)
                assert summed is not None
                work.append(summed)
        self._sent[fragment] = SentFragment(buckets, flats, numbers, work, over)

    def _weighted(self, bucket: list[nn.Parameter], weights: list[float], squares: Tensor) -> Tensor:
        """Returns the weighted sum of this rank's differences in one flat tensor, and adds their squares."""
        held = [as_real(local(p.detach())) for p in bucket]
        wide = torch.promote_types(held[0].dtype, torch.float32)
        size = sum(each.numel() for each in held)
        flat = torch.zeros(size, dtype=wide, device=bucket[0].device)
        for replica, weight in zip(self._replicas.all, weights, strict=True):
            start = 0
            for parameter in bucket if weight else ():
                own = as_real(self._replicas.weights_of(replica, parameter))
                difference = (as_real(self._replicas.merged[parameter]).to(wide) - own.to(wide)).flatten()
                flat[start : start + difference.numel()].add_(difference, alpha=weight)
                squares += weight * difference.square().sum()
                start += difference.numel()
        return flat

    @torch.no_grad()
    def finish(self, fragment: int) -> bool:
        """Waits for a fragment's sum and steps the outer optimizer. The ranks of `send` must call this together.

        If a difference is not finite, or no replica has trained on any term, the merged weights stay as they are, on
        all ranks alike, and the replicas go on from them.

        Returns:
            False if a difference is not finite.
        """
        sent = self._sent.pop(fragment)
        with waiting(), named_range("end of the merge of fragment", fragment):
            for work in sent.work:
                work.wait()
        self.sent_nbytes += sent.over.newly_sent()
        weight, squares = sent.numbers.tolist()
        parameters = [parameter for bucket in sent.buckets for parameter in bucket]
        unsound = [flat for flat in sent.flats if not math.isfinite(number_of(flat))]
        for flat in sent.flats:
            flat.div_(weight or 1.0)
        length = sum(float(flat.square().sum()) for flat in sent.flats)
        own, device = [length, squares, float(len(unsound))], self._learner.session.device
        length, squares, bad = summed_numbers(own, self._others, device)
        if bad or not weight:
            self._give(parameters, 0.0)
            return not bad
        for bucket, flat in zip(sent.buckets, sent.flats, strict=True):
            self._to_gradients(bucket, flat)
        if self._others is not None:
            self._make_alike(parameters, self._others)
        self.spreads.append(math.sqrt(max(0.0, squares / weight - length) / length) if length else 0.0)
        self._step(parameters)
        return True

    def _make_alike(self, parameters: list[nn.Parameter], ranks: dist.ProcessGroup) -> None:
        """Gives the ranks of a replica the first one's differences of the weights that all of them hold whole. Each
        has summed them in another message, so rounding could make them differ."""
        whole = [p.grad for p in parameters if p.grad is not None and shard_spec(p) is None]
        broadcast_together(whole, ranks, 0, self._learner.settings.bucket_nbytes)

    def _to_gradients(self, bucket: list[nn.Parameter], flat: Tensor) -> None:
        held = [as_real(local(p.detach())) for p in bucket]
        for parameter, own, part in zip(
            bucket, held, torch.split(flat, [own.numel() for own in held]), strict=True
        ):
            gradient = part.view_as(own).to(own.dtype)
            made = torch.view_as_complex(gradient) if parameter.is_complex() else gradient
            parameter.grad = as_held(made, parameter)

    def _step(self, parameters: list[nn.Parameter]) -> None:
        """Steps the outer optimizer from the merged weights, and gives the result to the replicas of this rank."""
        merged, alpha = self._replicas.merged, self._alpha
        own = [local(parameter).detach().clone() for parameter in parameters] if alpha else []
        for parameter in parameters:
            local(parameter).copy_(merged[parameter])
        with named_range("outer optimizer"):
            self._outer.step()
        for parameter in parameters:
            parameter.grad = None
            merged[parameter].copy_(local(parameter))
        for parameter, value in zip(parameters, own, strict=False):
            local(parameter).copy_(value)
        self._give(parameters, alpha)

    def _give(self, parameters: list[nn.Parameter], alpha: float) -> None:
        """Gives the merged weights to the replicas of this rank, which keep a part ``alpha`` of their own."""
        for replica in self._replicas.all:
            for parameter in (
                parameters if replica.weights is not None or replica is self._replicas.current else ()
            ):
                own, merged = self._replicas.weights_of(replica, parameter), self._replicas.merged[parameter]
                own.lerp_(merged, 1 - alpha) if alpha else own.copy_(merged)

    def close(self) -> None:
        """Frees the resources of the all-reduce."""
        self._everyone.close()
