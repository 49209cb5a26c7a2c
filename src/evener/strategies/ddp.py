"""A replica of the model on every rank, on PyTorch's DistributedDataParallel.

DDP's reducer fills buckets while backward runs and hands each to a communication hook; here the hook sums. Two things
are done differently from DDP's own ways.

*Missing gradients.* DDP waits for a gradient of every parameter, or, with ``find_unused_parameters``, walks the graph
and exchanges a map of used parameters in every step. Here a backward that leaves some buckets unfilled is followed by
a second one that gives zeros to the parameters that were left out, in the same iteration of the reducer, so that a rank
whose samples skip a layer neither hangs the others nor costs the usual step anything.

*Nothing but gradients is exchanged in a step.* Buffers are not broadcast before every forward pass: those of BatchNorm
are exact and therefore equal, others are shared only if a forward pass was seen to write to them.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd.function import once_differentiable
from torch.futures import Future
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from evener.collectives.base import AllReduce
from evener.collectives.buckets import bucket_nbytes
from evener.collectives.hook import hook, power_sgd_hook, power_sgd_state
from evener.collectives.registry import make
from evener.errors import ConfigurationError
from evener.hardware.stopwatch import waiting
from evener.nn.batch_norm import exact_batch_norm
from evener.runtime.session import Session
from evener.strategies.base import Replica, Settings
from evener.strategies.pace import Pace
from evener.strategies.single import Single
from evener.task import Task


class Ddp(Single):
    """Every rank holds the whole model; gradients are summed while backward runs."""

    def __init__(self, task: Task, session: Session, settings: Settings) -> None:
        self._all_reduce, self._send = _sender(session, settings)
        self._norm_group: dist.ProcessGroup | None = None
        super().__init__(task, session, settings)
        self._names = {parameter: name for name, parameter in self.model.named_parameters()}
        self._sparse = set(_sparse_parameters(self.model))
        self._hook = GradientSum(self._send, self.pace)
        self._filled: set[Tensor] = set()
        self._broadcast_state()

    def prepare(self, model: nn.Module) -> nn.Module:
        if any(isinstance(module, _BatchNorm) for module in model.modules()):
            # A group of its own, so that its messages in backward never meet those of the buckets.
            self._norm_group = dist.new_group(timeout=self.session.group_timeout)
            return exact_batch_norm(model, self._norm_group)
        return model

    @cached_property
    def replica(self) -> nn.Module:
        replica = Replica(self.model, self.task.exact_loss(), self.task.forward)
        for parameter in self._names:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._filled.add)  # type: ignore[no-untyped-call]
        ddp = DistributedDataParallel(
            replica,
            process_group=self.session.group,
            bucket_cap_mb=self.bucket_bytes / 2**20,
            gradient_as_bucket_view=True,
            **_NO_BUFFER_BROADCAST,
        )
        # Without annotations, which DDP compares with the classes themselves and not with their names.
        ddp.register_comm_hook(self._hook, lambda hook, bucket: hook(bucket))
        return ddp

    @cached_property
    def bucket_bytes(self) -> int:
        """That of the settings, or chosen by what the all-reduce is expected to take."""
        nbytes = sum(p.nbytes for p in self._names if p.requires_grad)
        return self.settings.bucket_bytes or bucket_nbytes(self._all_reduce.expected_seconds, nbytes)

    def exchanging(self, last: bool) -> AbstractContextManager[Any]:
        self._filled.clear()
        self._hook.begin()
        return nullcontext() if last else self.replica.no_sync()  # type: ignore[operator]

    def complete(self) -> tuple[str, ...]:
        if self._hook.saw_last_bucket:
            return ()
        unfilled = [p for p in self._names if p.requires_grad and p not in self._filled]
        missing = tuple(self._names[p] for p in unfilled if p.grad is None)
        zeros = _ZeroGradients.apply([p in self._sparse for p in unfilled], *unfilled)  # type: ignore[no-untyped-call]
        zeros.backward()
        return missing

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        self._check_own(parameters)
        named = [(self._names[p], p) for p in parameters if p.requires_grad]
        absent = [name for name, p in named if p.grad is None]
        everywhere = set.intersection(*map(set, self.session.control.gather_objects(absent)))
        present = [p for name, p in named if name not in everywhere]
        for parameter in present:
            if parameter.grad is None:
                parameter.grad = _zeros(parameter, parameter in self._sparse)
        gradients = [p.grad for p in present if p.grad is not None]
        for bucket in _buckets(gradients, self.bucket_bytes):
            self._sum_together(bucket)

    def _check_own(self, parameters: Sequence[nn.Parameter]) -> None:
        strangers = [tuple(p.shape) for p in parameters if p not in self._names]
        if strangers:
            raise ConfigurationError(
                f"{len(strangers)} parameters of the optimizer, the first of shape {strangers[0]}, are not of the "
                "task's model, so that every rank has its own: have Task.model return one module that holds all that "
                "is trained"
            )

    def _sum_together(self, gradients: list[Tensor]) -> None:
        if gradients[0].is_sparse:
            for gradient in gradients:
                self._all_reduce(gradient).wait()
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._all_reduce(flat).wait()
        for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def share_buffers(self, source: int) -> None:
        for module, name in self._loose_buffers:
            buffer = module._buffers[name]
            if buffer is not None:
                dist.broadcast(buffer, group=self.session.group, group_src=source)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._broadcast_state()

    def _broadcast_state(self) -> None:
        """Starts all replicas from rank 0's weights, whatever a model's constructor drew on this rank."""
        with torch.no_grad():
            for tensor in self.model.state_dict().values():
                if isinstance(tensor, Tensor):
                    dist.broadcast(tensor, group=self.session.group, group_src=0)

    def close(self) -> None:
        # The reducer must be gone before its process group is.
        self.__dict__.pop("replica", None)
        gc.collect()
        self._all_reduce.close()
        if self._norm_group is not None:
            dist.destroy_process_group(self._norm_group)
            self._norm_group = None


Send = Callable[[GradBucket], Future[Tensor]]
"""Starts to sum a bucket over the ranks."""


def _sender(session: Session, settings: Settings) -> tuple[AllReduce, Send]:
    """The all-reduce of the settings, and how it sends a bucket."""
    compression = None if settings.compression == "powersgd" else settings.compression
    all_reduce = make(settings.all_reduce, session.group, session.timeout_seconds, compression)
    if settings.compression == "powersgd":
        return all_reduce, partial(power_sgd_hook, power_sgd_state(session.group))
    return all_reduce, partial(hook, all_reduce)


class GradientSum:
    """DDP's communication hook: sums each bucket, which is no work of this rank's own."""

    def __init__(self, send: Send, pace: Pace) -> None:
        self._send = send
        self._pace = pace
        self.begin()

    def begin(self) -> None:
        """A micro-batch begins."""
        self.saw_last_bucket = False

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        self.saw_last_bucket = bucket.is_last()
        if self.saw_last_bucket:
            self._pace.work_done()
        with waiting():
            return self._send(bucket)


class _ZeroGradients(torch.autograd.Function):
    """A scalar whose gradient is zero in every parameter: what a rank adds to a sum of which it has no term."""

    @staticmethod
    def forward(ctx: Any, sparse: list[bool], *parameters: Tensor) -> Tensor:
        ctx.parameters = list(zip(parameters, sparse, strict=True))
        return parameters[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(_zeros(parameter, sparse) for parameter, sparse in ctx.parameters))


def _zeros(parameter: Tensor, sparse: bool) -> Tensor:
    if not sparse:
        return torch.zeros_like(parameter)
    shape = parameter.shape
    indices = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(
        indices, parameter.new_zeros((0, *shape[1:])), shape, check_invariants=False
    )


def _sparse_parameters(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            yield module.weight


def _buckets(gradients: Iterable[Tensor], nbytes: int) -> Iterator[list[Tensor]]:
    """Gradients of one layout, type and device together, until they reach ``nbytes``."""
    open_buckets: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        key = (gradient.is_sparse, gradient.dtype, gradient.device)
        bucket = open_buckets.setdefault(key, [])
        bucket.append(gradient)
        if sum(g.numel() * g.element_size() for g in bucket if not g.is_sparse) >= nbytes:
            yield open_buckets.pop(key)
    yield from open_buckets.values()


# torch 2.13 renamed the option and warns about the old name.
_NO_BUFFER_BROADCAST: dict[str, Any] = {
    name: False
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
}
if len(_NO_BUFFER_BROADCAST) > 1:
    del _NO_BUFFER_BROADCAST["broadcast_buffers"]
