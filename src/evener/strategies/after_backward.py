"""Sums gradients over the ranks after backward.

DistributedDataParallel, which sums during backward (:mod:`evener.strategies.ddp`), is faster where it can be used. Its
hooks require alternating forward and backward passes of the whole model. A pipeline schedule and a training loop of the
user's own do not meet this requirement.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import nn

from evener.collectives.base import AllReduce, SizeCounts
from evener.components import gradients
from evener.components.coalesce import in_buckets
from evener.distributed.mesh import DIVIDING_TERMS
from evener.errors import ConfigurationError
from evener.hardware.async_read import Readout
from evener.strategies.learner import Learner
from evener.strategies.reducer import Reducer, all_reduce_of, is_apart, sum_in_buckets
from evener.strategies.single import NoSync
from evener.strategies.synchronizer import Synchronizer


def summing_afterwards(learner: Learner) -> Synchronizer:
    """Returns a synchronizer that sums gradients after backward over the ranks that divide a batch. With only one such
    rank, returns one that sums nothing."""
    group = learner.mesh.group(*DIVIDING_TERMS)
    return NoSync(learner) if group is None else PostBackwardSum(learner, group)


class PostBackwardSum(Reducer):
    """Sums gradients over the ranks of ``group``, one bucket after the other.

    Raises:
        ConfigurationError: If the compression is one that only DistributedDataParallel supports (PowerSGD).
    """

    exchanges_in_passes = False
    follows = True

    def __init__(self, learner: Learner, group: dist.ProcessGroup) -> None:
        super().__init__(learner, group)
        self._all_reduce = self._summed_by()
        self._sparse = gradients.sparse_weights(learner.model)
        self._own: Readout | None = None

    def _summed_by(self) -> AllReduce:
        settings = self._learner.settings
        if settings.compression == "powersgd":
            raise ConfigurationError(
                f"strategy {self._learner.name!r} cannot compress with 'powersgd', which goes with 'ddp' alone; leave "
                "compress out, or use another"
            )
        return all_reduce_of(self._learner, self._group)

    @property
    def words(self) -> str:  # type: ignore[override]
        return self._all_reduce.words

    def collectives(self) -> list[dict[str, Any]]:
        about = {"name": "all_reduce", "algorithm": self._all_reduce.words}
        return [
            about | {"nbytes": nbytes, "calls": size.calls} | _times(size)
            for nbytes, size in sorted(self._all_reduce.sizes.items())
        ]

    @property
    def bucket_nbytes(self) -> int:  # type: ignore[override]
        """Bytes that the all-reduce holds, plus the largest bucket of several gradients, into which they are copied."""
        dense = [p for p in self._trained if p.grad is not None and p.numel() and not p.grad.is_sparse]
        buckets = in_buckets(dense, self.bucket_bytes, lambda p: p)
        sizes = [sum(p.nbytes for p in bucket) for bucket in buckets if len(bucket) > 1]
        return self._all_reduce.held_nbytes + max(sizes, default=0)

    def complete(self) -> tuple[str, ...]:
        trained = self._trained
        missing = self._without_gradient([*trained, *self._thawed()])
        self._own = self._learner.all_gradients.check()
        self._learner.work_timer.work_done()
        self._sum(trained)
        self._forget_frozen()
        return missing

    def _without_gradient(self, parameters: Iterable[nn.Parameter]) -> tuple[str, ...]:
        names = self._learner.names
        return tuple(names[p] for p in parameters if p.grad is None and p.numel() and p.requires_grad)

    def _thawed(self) -> list[nn.Parameter]:
        return [p for p in self._learner.trained.thawed if not is_apart(p)]

    def _forget_frozen(self) -> None:
        for parameter in self._learner.trained.frozen:
            parameter.grad = None

    def sum_thawed(self, without: Collection[str]) -> None:
        self._sum(p for p in self._thawed() if self._learner.names[p] not in without)

    def soundness(self) -> tuple[Readout, ...]:
        return () if self._own is None else (self._own,)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        self.check_known(parameters)
        names = self._learner.names
        named = [(names[p], p) for p in parameters if p.requires_grad and not is_apart(p)]
        self._learner.look_at(p for _, p in named)
        everywhere = self.absent_everywhere([name for name, p in named if p.grad is None])
        self._sum(p for name, p in named if name not in everywhere)

    def close(self) -> None:
        self._all_reduce.close()

    @cached_property
    def _trained(self) -> list[nn.Parameter]:
        """The parameters whose gradients are summed, of those that are trained at the start."""
        return [p for p in self._learner.trained.first if not is_apart(p)]

    def hooked_in(self, passes: int) -> Sequence[nn.Parameter]:
        super().hooked_in(passes)
        if not (found := self._hooked.now()):
            return ()
        summed = {*self._trained, *self._thawed()}
        return [p for p in found if p in summed]

    def _sum(self, parameters: Iterable[nn.Parameter]) -> None:
        sum_in_buckets(parameters, self._sparse, self.bucket_bytes, self._all_reduce)


def _times(size: SizeCounts) -> dict[str, float]:
    """Returns the number of timed calls, their seconds, and those of the shortest one; nothing if none was timed."""
    if not size.timed:
        return {}
    return {"timed": size.timed, "timed_seconds": size.seconds, "least_seconds": size.least}
