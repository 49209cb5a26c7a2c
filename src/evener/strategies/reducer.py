"""What synchronizers share that sum gradients over the ranks that divide a batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.collectives.base import AllReduce, key_of
from evener.collectives.registry import make
from evener.components import gradients
from evener.components.checks.param_hooks import refuse_late_hooks
from evener.components.coalesce import broadcast_together, in_buckets, sent_as_one
from evener.components.sharded_tensor.local import local
from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.components.trainable import check_trained_alike
from evener.distributed.mesh import DIVIDING_TERMS
from evener.errors import ConfigurationError, TaskError
from evener.hardware.profile_ranges import named_range
from evener.hardware.timers import waiting
from evener.strategies.learner import Learner
from evener.strategies.synchronizer import Synchronizer
from evener.torch_internals.autograd import HookedTensors


class Reducer(Synchronizer):
    """Sums gradients over the ranks of ``group``, which divide a batch. Subclasses say when and how."""

    unknown_remedy: ClassVar[str] = (
        "task's model, so that every rank has its own: have Task.model return one module that holds all that is trained"
    )
    """The end of the message about a parameter that the synchronizer does not know."""

    def __init__(self, learner: Learner, group: dist.ProcessGroup) -> None:
        self._learner, self._group = learner, group

    @property
    def bucket_bytes(self) -> int:
        """The bucket size in bytes: from the settings, or a default."""
        return self._learner.settings.bucket_nbytes

    def share_buffers(self, buffers: Sequence[Tensor], part: int) -> None:
        broadcast_together(
            buffers, self._group, part * self._learner.mesh.degree("context"), self.bucket_bytes
        )

    def sums_in_backward(self, parameter: nn.Parameter) -> bool:
        return is_apart(parameter)

    def hooked_in(self, passes: int) -> Sequence[nn.Parameter]:
        divided = [p for p in self._hooked.now() if shard_spec(p) is not None]
        refuse_late_hooks(divided, self._learner.names)
        return ()

    @cached_property
    def _hooked(self) -> HookedTensors[nn.Parameter]:
        return HookedTensors(lambda: self._learner.names)

    def unused(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        return [self._learner.names[p] for p in parameters if p.grad is None and p.numel()]

    def check_known(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raises ConfigurationError if one of ``parameters`` is not a parameter of the model."""
        unknown = [tuple(p.shape) for p in parameters if p not in self._learner.names]
        if unknown:
            raise ConfigurationError(
                f"{len(unknown)} parameters of the optimizer, the first of shape {unknown[0]}, are not of the "
                f"{self.unknown_remedy}"
            )

    def absent_everywhere(self, absent: Collection[str], unsound: str | None = None) -> set[str]:
        """Returns the names that are ``absent`` on every rank that computes other samples with the same weights. All
        ranks must call this together, before a sum that the user's own loop asks for.

        Args:
            absent: Names of the parameters to which this rank gave no gradient.
            unsound: What has a gradient on this rank that is not finite, if no parameter that was looked at has.

        Raises:
            ConfigurationError: If the set of trained parameters has changed and cannot, or differs between the ranks.
            DivergenceError: On all ranks alike, if a gradient of one is not finite.
        """
        learner = self._learner
        learner.trained.update(learner.name, self.follows)
        own = set(absent), learner.unsound.name() or unsound, learner.trained.changes
        said = learner.session.control.gather_objects(own)
        check_trained_alike([changes for *_, changes in said])
        gradients.check_sound([unsound for _, unsound, _ in said])
        return set.intersection(*(said[rank][0] for rank in learner.mesh.ranks(*DIVIDING_TERMS)))


def all_reduce_of(learner: Learner, group: dist.ProcessGroup, *, compresses: bool = True) -> AllReduce:
    """Returns the all-reduce of the learner's settings, over the ranks of ``group``.

    Args:
        compresses: False to send everything as it is, whatever the settings say.
    """
    settings, session = learner.settings, learner.session
    seconds, inside = session.timeout_seconds, session.inner_backend
    return make(settings.all_reduce, group, seconds, settings.compression if compresses else None, inside)


def is_apart(parameter: nn.Parameter) -> bool:
    """Returns True if the ranks over which gradients are summed each hold a shard of the parameter. Such a gradient
    needs no sum."""
    piece = shard_spec(parameter)
    return piece is not None and any(axis in DIVIDING_TERMS for axis in piece.axes)


def check_types(names: Mapping[nn.Parameter, str], types: Mapping[nn.Parameter, torch.dtype]) -> None:
    """Checks that parameters are of the types that they had. With another one, autograd forgets the hooks on a
    parameter, by which its gradient is summed.

    Raises:
        TaskError: If a forward pass has changed a type.
    """
    for parameter, was in types.items():
        if parameter.dtype != was:
            raise TaskError(
                f"{names[parameter]} was of {was}, and the forward pass has made it one of {parameter.dtype}, of which "
                "ranks sum no gradient: use precision='bf16', with weights of float32, or convert a copy in each "
                "pass, as in F.linear(x.float(), layer.weight.float())"
            )


def zeros_of(parameter: Tensor, sparse: bool) -> Tensor:
    """Returns the zero gradient that a rank without a gradient contributes to the sum."""
    if not sparse:
        return torch.zeros_like(parameter)
    shape = parameter.shape
    indices = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(
        indices, parameter.new_zeros((0, *shape[1:])), shape, check_invariants=False
    )


def sum_in_buckets(
    parameters: Iterable[nn.Parameter], sparse: Collection[Tensor], nbytes: int, all_reduce: AllReduce
) -> None:
    """Sums the gradients of ``parameters`` in buckets of about ``nbytes`` bytes. A rank without a gradient contributes
    zeros, of the sparse layout if the parameter is in ``sparse``."""
    present = [p for p in parameters if p.numel()]
    for parameter in present:
        if parameter.grad is None:
            parameter.grad = zeros_of(parameter, parameter in sparse)
    with waiting():
        for number, bucket in enumerate(in_buckets(present, nbytes, _gradient)):
            with named_range("all_reduce bucket", number):
                sum_together([_gradient(p) for p in bucket], all_reduce, key_of(bucket))


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)


def sum_together(found: Sequence[Tensor], all_reduce: AllReduce, key: Any = None) -> None:
    """Sums tensors of one layout, type and device: dense ones as one message, sparse ones each alone."""
    if found[0].is_sparse:
        for gradient in found:
            all_reduce(gradient).wait()
    else:
        sent_as_one(found, lambda flat: all_reduce(flat, key).wait())
