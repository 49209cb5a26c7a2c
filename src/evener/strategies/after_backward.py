"""Sums gradients over the ranks after backward.

DistributedDataParallel, which sums during backward (:mod:`evener.strategies.ddp`), is faster where it can be used. Its
hooks require alternating forward and backward passes of the whole model. A pipeline schedule and a training loop of the
user's own do not meet this requirement.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.collectives.base import AllReduce, key_of
from evener.collectives.ddp.buckets import DEFAULT_BUCKET_NBYTES
from evener.collectives.registry import make
from evener.components import gradients
from evener.components.coalesce import broadcast_together, sent_as_one
from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.components.trainable import check_trained_alike
from evener.distributed.mesh import DIVIDING_TERMS
from evener.errors import ConfigurationError
from evener.hardware.async_read import Readout
from evener.hardware.timers import waiting
from evener.strategies.interfaces import Synchronizer
from evener.strategies.learner import Learner
from evener.strategies.single import NoSync


def summing_afterwards(learner: Learner) -> Synchronizer:
    """Returns a synchronizer that sums gradients after backward over the ranks that divide a batch. With only one such
    rank, returns one that sums nothing."""
    group = learner.mesh.group(*DIVIDING_TERMS)
    return NoSync(learner) if group is None else PostBackwardSum(learner, group)


class PostBackwardSum(Synchronizer):
    """Sums gradients over the ranks of ``group``, one bucket after the other.

    Raises:
        ConfigurationError: If the compression is one that only DistributedDataParallel supports (PowerSGD).
    """

    exchanges_in_passes = False
    follows = True

    def __init__(self, learner: Learner, group: dist.ProcessGroup) -> None:
        self._learner, self._group = learner, group
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
        session = self._learner.session
        seconds, inside = session.timeout_seconds, session.inner_backend
        return make(settings.all_reduce, self._group, seconds, settings.compression, inside)

    @property
    def words(self) -> str:  # type: ignore[override]
        return self._all_reduce.words

    @property
    def bucket_bytes(self) -> int:
        """The bucket size in bytes: from the settings, or a default."""
        return self._learner.settings.bucket_bytes or DEFAULT_BUCKET_NBYTES

    @property
    def bucket_nbytes(self) -> int:  # type: ignore[override]
        """Bytes that the all-reduce holds, plus the largest bucket, into which gradients are copied to be sent."""
        sizes = [sum(p.nbytes for p in bucket) for bucket in in_buckets(self._present(), self.bucket_bytes)]
        return self._all_reduce.held_nbytes + max(sizes, default=0)

    def complete(self) -> tuple[str, ...]:
        trained = self._trained()
        missing = self._without_gradient([*trained, *self._thawed()])
        self._own = self._learner.look_at(self._learner.names)
        self._learner.pace.work_done()
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
        self._check_own(parameters)
        names = self._learner.names
        named = [(names[p], p) for p in parameters if p.requires_grad and not is_apart(p)]
        absent = [name for name, p in named if p.grad is None]
        self._learner.look_at(p for _, p in named)
        self._learner.trained.update(self._learner.name, self.follows)
        own = absent, self._learner.unsound.name(), self._learner.trained.changes
        said = self._learner.session.control.gather_objects(own)
        check_trained_alike([changes for *_, changes in said])
        gradients.check_sound([unsound for _, unsound, _ in said])
        same = [said[rank] for rank in self._learner.mesh.ranks(*DIVIDING_TERMS)]
        everywhere = set.intersection(*(set(absent) for absent, *_ in same))
        self._sum([p for name, p in named if name not in everywhere])

    def share_buffers(self, buffers: Sequence[Tensor], part: int) -> None:
        broadcast_together(buffers, self._group, part * self._learner.mesh.degree("context"))

    def close(self) -> None:
        self._all_reduce.close()

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self._learner.trained.first if not is_apart(p)]

    def _present(self) -> list[nn.Parameter]:
        """Returns the trained parameters that have a gradient now."""
        return [p for p in self._trained() if p.grad is not None and p.numel()]

    def _sum(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums the gradients of ``parameters`` over the ranks. A rank without a gradient contributes zeros."""
        present = [p for p in parameters if p.numel()]
        for parameter in present:
            if parameter.grad is None:
                parameter.grad = zeros_of(parameter, parameter in self._sparse)
        with waiting():
            for bucket in in_buckets(present, self.bucket_bytes):
                self._sum_together(bucket)

    def _sum_together(self, parameters: list[nn.Parameter]) -> None:
        found = [p.grad for p in parameters if p.grad is not None]
        if found[0].is_sparse:
            for gradient in found:
                self._all_reduce(gradient).wait()
            return
        sent_as_one(found, lambda flat: self._all_reduce(flat, key_of(parameters)).wait())

    def _check_own(self, parameters: Sequence[nn.Parameter]) -> None:
        strangers = [tuple(p.shape) for p in parameters if p not in self._learner.names]
        if strangers:
            raise ConfigurationError(
                f"{len(strangers)} parameters of the optimizer, the first of shape {strangers[0]}, are not of the "
                "task's model, so that every rank has its own: have Task.model return one module that holds all that "
                "is trained"
            )


def is_apart(parameter: nn.Parameter) -> bool:
    """Returns True if the ranks over which gradients are summed each hold a shard of the parameter. Such a gradient
    needs no sum."""
    piece = shard_spec(parameter)
    return piece is not None and any(axis in DIVIDING_TERMS for axis in piece.axes)


def zeros_of(parameter: Tensor, sparse: bool) -> Tensor:
    """Returns the zero gradient that a rank without a gradient contributes to the sum."""
    if not sparse:
        return torch.zeros_like(parameter)
    shape = parameter.shape
    indices = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(
        indices, parameter.new_zeros((0, *shape[1:])), shape, check_invariants=False
    )


def in_buckets(parameters: Iterable[nn.Parameter], nbytes: int) -> Iterator[list[nn.Parameter]]:
    """Yields buckets of parameters whose gradients have the same layout, type and device, each of about ``nbytes``
    bytes."""
    open_buckets: dict[Any, list[nn.Parameter]] = {}
    sizes: dict[Any, int] = {}
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        key = (gradient.is_sparse, gradient.dtype, gradient.device)
        open_buckets.setdefault(key, []).append(parameter)
        sizes[key] = sizes.get(key, 0) + (0 if gradient.is_sparse else gradient.nbytes)
        if sizes[key] >= nbytes:
            sizes[key] = 0
            yield open_buckets.pop(key)
    yield from open_buckets.values()
