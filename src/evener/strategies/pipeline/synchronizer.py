"""Gradient synchronization between the stages of a pipeline, after backward.

A weight that one rank uses is empty elsewhere, so that its gradient is not summed over the pipeline. What remains:

- *Missing gradients.* A weight that no sample used has no gradient and is not stepped. The ranks exchange a short row
of
  flags for this, so that an optimizer keeps the same state everywhere, empty where the weight is.
- *Gradients that are not finite.* All ranks stop together. A rank that went on to the update would wait for one that
  has stopped.
- *Weights of several stages* (tied weights) and scalars, which cannot be empty, are whole on every rank. Their
gradients
  are summed over the axis.
- *Buffers* are taken from the stage that uses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from evener.collectives.sparse import is_native, sum_gathered
from evener.components import gradients
from evener.components.coalesce import broadcast_together, sent_in_buckets
from evener.components.sharded_tensor.shard_spec import slice_over
from evener.core.half_precision import added_in_float32
from evener.distributed.mesh import DIVIDING_TERMS
from evener.errors import ConfigurationError
from evener.hardware.async_read import Readout, is_late
from evener.hardware.timers import waiting
from evener.strategies.learner import Learner
from evener.strategies.pipeline.stage_forward import StagedForward
from evener.strategies.reducer import zeros_of
from evener.strategies.synchronizer import Synchronizer, SynchronizerAround


class PipelineGradSync(SynchronizerAround):
    """Sums over ``axis`` the gradients of weights that several stages use.

    Args:
        forward: Staged forward of the learner's model.
        inner: Sums the gradients over other axes.
    """

    follows = False  # a weight's owners are those that train it at the start

    def __init__(self, learner: Learner, axis: str, forward: StagedForward, inner: Synchronizer) -> None:
        super().__init__(inner)
        self._learner, self._forward = learner, forward
        self._owners = forward.owners
        self._axis, self._index = axis, learner.mesh.index(axis)
        self._group = learner.mesh.new_group(axis)
        self._sparse = gradients.sparse_weights(learner.model)
        self._sound: tuple[Readout, ...] = ()

    @property
    def words(self) -> str:  # type: ignore[override]
        several = self._learner.mesh.group(*DIVIDING_TERMS) is not None
        return self._inner.words if several else "none: each weight is of one stage"

    def complete(self) -> tuple[str, ...]:
        absent = self._given_none(self._inner.complete())
        self._sound = self._inner.soundness()
        tells = bool(absent), self._forward.refusal is not None, not self._is_sound()
        with waiting():
            rows = self._learner.session.control.exchange([*map(float, tells)]).wait()
        trained = self._trained()
        if any(doubt for *_, doubt in rows):
            return tuple(trained)  # leads to an error that names the rank with a number that is not finite
        missing = self._missing_everywhere(absent) if any(map(any, rows)) else set()
        for name, parameter in trained.items():
            if parameter.grad is None and name in self._owners and name not in missing:
                parameter.grad = zeros_of(parameter, parameter in self._sparse)
        self._sum_shared(p for name, p in trained.items() if name not in missing)
        for name in missing | (trained.keys() - self._owners.keys()):
            trained[name].grad = None
        return ()

    def _given_none(self, filled: Iterable[str]) -> list[str]:
        """Returns the weights of this rank's stages to which it gave no gradient: those without one, and those that the
        sums over other axes have ``filled``."""
        without = {name for name, parameter in self._trained().items() if parameter.grad is None}
        return [name for name in without.union(filled) if self._index in self._owners.get(name, ())]

    def _is_sound(self) -> bool:
        """Returns False if this rank's totals or gradients are not finite. Returns True on a GPU, without waiting."""
        if is_late(self._learner.session.device):
            return True
        return all(math.isfinite(number.value()) for number in (*self._forward.totals, *self._sound))

    def _missing_everywhere(self, absent: list[str]) -> set[str]:
        """Returns the weights to which no rank that uses them gave a gradient. Raises ConfigurationError if a rank
        rejects the task. All ranks must call this together."""
        with waiting():
            said = self._learner.session.control.gather_objects((absent, self._forward.refusal))
        for _, refusal in said:
            if refusal is not None:
                raise ConfigurationError(refusal)
        return self._absent_from_all([set(absent) for absent, _ in said])

    def _absent_from_all(self, absent: Sequence[set[str]]) -> set[str]:
        layout = self._learner.mesh.layout
        places = [layout.place(rank)[self._axis] for rank in range(layout.world_size)]

        def nobody(name: str) -> bool:
            users = [rank for rank, place in enumerate(places) if place in self._owners[name]]
            return all(name in absent[rank] for rank in users)

        return {name for name in set().union(*absent) if nobody(name)}

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for p, name in self._learner.names.items() if p.requires_grad}

    def _sum_shared(self, parameters: Iterable[nn.Parameter]) -> None:
        shared = (p for p in parameters if p.numel() and not self._is_apart(p))
        found = [p.grad for p in shared if p.grad is not None]
        with waiting():
            for gradient in (gradient for gradient in found if gradient.is_sparse):
                self._sum_sparse(gradient)
        dense = (gradient for gradient in found if not gradient.is_sparse)
        sent_in_buckets(dense, self._all_reduce, self._learner.settings.bucket_nbytes)

    def _sum_sparse(self, gradient: Tensor) -> None:
        if is_native(gradient):
            self._all_reduce(gradient)
        else:
            sum_gathered(gradient, self._group)

    def _all_reduce(self, tensor: Tensor) -> None:
        added_in_float32(tensor, lambda wide: dist.all_reduce(wide, group=self._group))

    def _is_apart(self, parameter: nn.Parameter) -> bool:
        return slice_over(parameter, self._axis) is not None

    def soundness(self) -> tuple[Readout, ...]:
        return self._sound

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        raise ConfigurationError(
            "a loop of your own cannot go backward through a pipeline, whose stages are on several ranks: take steps "
            "with engine.step(batch), or use another strategy, such as 'ddp'"
        )

    def share_buffers(self, buffers: Sequence[Tensor], part: int) -> None:
        self._inner.share_buffers(buffers, part)
        source = {id(b): min(self._owners.get(n, {0})) for n, b in self._learner.model.named_buffers()}
        of_owners: dict[int, list[Tensor]] = {}
        for buffer in buffers:
            of_owners.setdefault(source.get(id(buffer), 0), []).append(buffer)
        for owner, held in of_owners.items():
            broadcast_together(held, self._group, owner, self._learner.settings.bucket_nbytes)
