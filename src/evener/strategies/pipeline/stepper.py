"""Runs the steps of a pipeline: each rank's part of a schedule, one action after the other.

Schedules give the order. Torch's own runtime is not used: it wants micro-batches of one shape in all steps, waits
within time that would count as work, and knows no scopes. Sends do not wait, so that ranks wait for each other only as
the schedule demands.

Micro-batches of the run, which BatchNorm normalizes together, are cut further into pieces of any size, to fill the
pipeline. A model with layers that look at several samples, such as BatchNorm, keeps its micro-batches whole, because
these layers would see each piece by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from evener.components.microbatches import pieces_of
from evener.components.tree_spec import put_together, signature
from evener.core.types import Tree
from evener.data.batch import Batch, MicroBatch
from evener.nn.attention_dispatch import attending
from evener.strategies.interfaces import StepOutcome, Stepper
from evener.strategies.learner import Learner
from evener.strategies.pipeline.p2p_trees import P2PTrees
from evener.strategies.pipeline.schedule import FORWARD, Order, TimedAction, plan_of
from evener.strategies.pipeline.schedule_runner import ScheduleRunner, StageLocation
from evener.strategies.pipeline.stage_forward import StagedForward


class PipelineStepper(Stepper):
    """Runs the stages of this rank.

    Args:
        axis: Mesh axis along which the stages lie.
        forward: Staged forward of the learner's model.
        schedule: See :mod:`evener.strategies.pipeline.schedule`.
        wanted: Least number of pieces per step, if there are so many samples.
    """

    def __init__(
        self, learner: Learner, axis: str, forward: StagedForward, schedule: str, wanted: int
    ) -> None:
        self.place = StageLocation(learner, forward, P2PTrees(learner.mesh, axis, learner.session.device))
        self._schedule, self._wanted = schedule, wanted
        self._unchecked = wanted > 1
        self.order: Order = ()
        """Order of the last step."""
        self.timed: list[TimedAction] = []
        """Times of this rank's actions in the last step."""
        self.pieces = 0
        """Number of pieces of the last step."""

    def run(self, batch: Batch, divisor: Callable[[], float], step: int) -> StepOutcome:
        place, learner, before = self.place, self.place.learner, self.place.learner.loose_buffers.versions()
        cut = [self._pieces(micro, batch) for micro in batch.micro_batches]
        pieces = list(chain.from_iterable(cut))
        plan = plan_of(self._schedule, place.post.degree, place.stages, len(pieces), place.post.index)
        self.order, self.pieces = plan.order, len(pieces)
        with learner.work_timer.step(step):
            looked_at = len(cut[0]) if self._unchecked and len(cut[0]) > 1 else 0
            turn = ScheduleRunner(place, plan, pieces, divisor, step, looked_at)
            with learner.synchronizer.until_complete():
                for action in plan.own_actions:
                    turn.run_action(action)
                place.post.finish()
            place.forward.refusal = self._of_several(before) or self._of_loss(turn, batch)
            self._unchecked = self._unchecked and not looked_at
            place.forward.totals = turn.totals
            missing = learner.synchronizer.complete()
        self.timed = turn.timed
        return StepOutcome(
            totals=tuple(turn.totals),
            missing=missing,
            buffers_changed=before != learner.loose_buffers.versions(),
            compute_seconds=learner.work_timer.taken(),
            soundness=learner.synchronizer.soundness(),
        )

    def _pieces(self, micro: MicroBatch, batch: Batch) -> list[MicroBatch]:
        return pieces_of(micro, -(-self._wanted // len(batch.micro_batches)))

    def _of_loss(self, turn: ScheduleRunner, batch: Batch) -> str | None:
        return turn.refusal(batch.micro_batches[0]) if turn.outputs else None

    def _of_several(self, before: list[tuple[int, int]]) -> str | None:
        """Returns a refusal if a buffer used by stages on several ranks was written to; None otherwise."""
        place = self.place
        after = place.learner.loose_buffers.versions()
        changed = {new[0] for old, new in zip(before, after, strict=True) if old != new}
        for name, buffer in place.learner.model.named_buffers() if changed else ():
            if id(buffer) in changed and len(place.forward.owners.get(name, ())) > 1:
                return (
                    f"buffer {name} is written in training and used by several stages of the pipeline, of which each "
                    "would have its own: write and use it inside of a block, or cut so that one stage has all its uses"
                )
        return None

    def outputs(self, micro: MicroBatch) -> Tree:
        """Runs this rank's stages one after the other. Several batches follow each other through the stages."""
        place, post, outputs = self.place, self.place.post, None
        key = partial(place.key, signature(micro.inputs), FORWARD)
        for stage in range(post.index, place.stages, post.degree):
            received: tuple[Any, ...] = ()
            if stage:
                came = post.receive(key(stage - 1), (stage - 1) % post.degree)
                received = put_together(*came)
            with attending(micro.sequence):
                found = place.forward.run(stage, received, place.learner.task.forward, micro.inputs)
            if stage < place.stages - 1:
                post.send(key(stage), found, (stage + 1) % post.degree)
            else:
                outputs = found
        post.finish()
        return outputs
