"""Runs the grains of a rank one after the other, so that nothing in a grain depends on what the rank computed before.

Each grain draws its random numbers from generators that are seeded by its position. What the forward passes leave
behind besides gradients, the running statistics of BatchNorm, follows after the last grain from the grains of all
ranks. Other buffers must not be written.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.components.determinism import naming_nondeterministic
from evener.components.model_with_loss import Replica
from evener.core.types import Tree
from evener.data.batch import Batch, MicroBatch
from evener.data.grains import seed_of_grain
from evener.distributed.mesh import DIVIDING_TERMS
from evener.errors import ConfigurationError
from evener.hardware.async_read import Readout
from evener.hardware.generators import all_kept, seed_all, seeded
from evener.hardware.timers import waiting
from evener.nn.grain_norm import GrainNorm, update_running_statistics
from evener.strategies.block_audit import BlockAudit
from evener.strategies.exact_bits import refuse_group, refuse_written_buffers
from evener.strategies.interfaces import StepOutcome, Stepper
from evener.strategies.learner import Learner
from evener.strategies.steppers.oom_sizing import sends_in_passes
from evener.strategies.steppers.plain import Plain


class GrainByGrain(Plain):
    """Runs micro-batches that are grains.

    Raises:
        TaskError: If a pass used an operation without a deterministic algorithm, wrote to a buffer, or asked for the
            group of the other ranks.
    """

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        self._norms = [module for module in learner.model.modules() if isinstance(module, GrainNorm)]
        # A group of its own, so that its messages cannot mix with those of gradients.
        self._group = learner.mesh.group(*DIVIDING_TERMS, use="normalization") if self._norms else None
        self.audit = BlockAudit(learner) if learner.settings.audit else None
        # Audits run it without the synchronizer's wrapper, whose passes all ranks must run equally often.
        self._bare = Replica(learner.model, learner.task.exact_loss(), learner.task.forward)
        self._auditing = False

    def run(self, batch: Batch, divisor: Callable[[], float], step: int) -> StepOutcome:
        learner = self._learner
        for norm in self._norms:
            norm.terms.clear()  # a step before may have failed
        again = partial(self._audit_pass, divisor=divisor, step=step)
        audit = self.audit if batch.audited else None
        with naming_nondeterministic(), all_kept(learner.session.device):
            if audit is not None:
                audit.begin(batch, again)
            before = learner.loose_buffers.versions()
            outcome = super().run(batch, divisor, step)
            if audit is not None:
                audit.compare(batch, step, again)
        if sends_in_passes(learner):
            refuse_group()
        if outcome.buffers_changed:
            refuse_written_buffers(learner.model, learner.loose_buffers, before)
        with waiting():
            update_running_statistics(self._norms, self._gather, self._add, learner.session.device)
        return outcome

    def _pass(self, micro: MicroBatch, last: bool, divisor: Callable[[], float], step: int) -> Readout:
        seed_all(self._seed(micro, step), self._learner.session.device)
        return super()._pass(micro, last, divisor, step)

    def _audit_pass(self, micro: MicroBatch, divisor: Callable[[], float], step: int) -> None:
        self._auditing = True
        try:
            self._pass(micro, False, divisor, step)
        finally:
            self._auditing = False

    @property
    def _replica(self) -> nn.Module:
        wrapped = super()._replica
        return self._bare if self._auditing else wrapped

    def _around_backward(self, micro: MicroBatch, term: Tensor) -> AbstractContextManager[None]:
        if self.audit is not None:
            self.audit.begin_grain(micro, term)
        return super()._around_backward(micro, term)

    def outputs(self, micro: MicroBatch) -> Tree:
        with naming_nondeterministic(), seeded(self._seed(micro, 0), self._learner.session.device):
            return super().outputs(micro)

    def _seed(self, micro: MicroBatch, step: int) -> int:
        return seed_of_grain(self._learner.settings.seed, step, micro.position)

    def _gather(self, own: Tensor) -> Tensor:
        if self._group is None:
            return own[None]
        found = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(found, own, group=self._group)
        return torch.stack(found)

    def _add(self, own: Tensor) -> Tensor:
        if self._group is not None:
            dist.all_reduce(own, group=self._group)
        return own


def audit_words(stepper: Stepper) -> str:
    """Returns a text for the record that tells of audits; "" if there are none."""
    audit = stepper.audit if isinstance(stepper, GrainByGrain) else None
    return "" if audit is None else f"; {audit.words}"


def by_grains(stepper: Stepper, learner: Learner) -> Stepper:
    """Returns the stepper of a run that is exact in bits, in place of a plain one; else ``stepper``.

    Raises:
        ConfigurationError: If the strategy has a stepper of its own.
    """
    if learner.settings.bits is None:
        return stepper
    if type(stepper) is not Plain:
        raise ConfigurationError(
            f"exact=bits runs one grain after the other, and strategy {learner.name!r} runs a batch in another way: "
            "use ddp, sharded or single"
        )
    return GrainByGrain(learner)
