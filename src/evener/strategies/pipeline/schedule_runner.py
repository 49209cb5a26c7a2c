"""Runs the actions of one rank in one step of a pipeline.

::

    forward   receive ─ [scope of the micro-batch: the stage's calls] ─ send on         the last stage: loss / divisor
    backward  receive ─ [the same scope: autograd] ─ send back
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from evener.components.microbatches import by_samples, joined
from evener.components.model_with_loss import term_of
from evener.components.tree_spec import holes_in, put_together, signature, taken_apart
from evener.data.batch import MicroBatch, cloned, detached, map_leaves
from evener.hardware.async_read import Readout, kept
from evener.hardware.profile_ranges import named_range
from evener.nn.attention_dispatch import attending
from evener.nn.context import Scope, resumed
from evener.strategies.learner import Learner
from evener.strategies.pipeline.p2p import Inbox
from evener.strategies.pipeline.p2p_trees import P2PTrees
from evener.strategies.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    RankSchedule,
    TimedAction,
)
from evener.strategies.pipeline.stage_forward import StagedForward
from evener.torch_internals.autograd import backward_of_inputs, backward_of_weights

_RANGES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT: "backward of inputs",
    WEIGHT: "backward of weights",
}
"""Names of the actions in a profile."""


@dataclass(frozen=True)
class StageLocation:
    """The learner, staged forward and message channel of one rank of a pipeline."""

    learner: Learner
    forward: StagedForward
    post: P2PTrees

    @property
    def stages(self) -> int:
        """Number of stages of the model."""
        return len(self.forward.stages)

    def key(self, inputs: str | None, kind: str, stage: int) -> Any:
        """Returns the key of a message's form: :func:`signature` of the model's inputs, modes, kind and stage."""
        return inputs, self.learner.model.training, torch.is_grad_enabled(), kind, stage


@dataclass
class SavedForward:
    """Tensors and scope of a forward pass, kept until its backward."""

    scope: Scope
    inputs: list[Tensor]
    """Inputs from the stage before that require a gradient."""
    outputs: list[Tensor]
    """Outputs that require a gradient: the loss, or the values that were handed on."""
    groups: list[dict[str, Any]] | None = None
    """Intermediate results for the gradients of the weights, if these are computed later than those of the inputs."""


class ScheduleRunner:
    """Runs one step of a rank.

    Args:
        pieces: All micro-batches of the step.
        divisor: See :class:`evener.strategies.interfaces.Stepper`.
        looked_at: Number of leading pieces that belong to the first micro-batch, to check that their losses add up to
            the
            loss of the whole micro-batch. 0 skips the check.
    """

    def __init__(
        self,
        place: StageLocation,
        plan: RankSchedule,
        pieces: Sequence[MicroBatch],
        divisor: Callable[[], float],
        step: int,
        looked_at: int,
    ) -> None:
        self._place, self._plan, self._pieces = place, plan, pieces
        self._signatures = [signature(piece.inputs) for piece in pieces]
        self._ask, self._step, self._looked_at = divisor, step, looked_at
        self._learner, self._post, self._last = place.learner, place.post, place.stages - 1
        self._began = time.perf_counter()
        self._divisor: float | None = None
        self._saved: dict[tuple[int, int], SavedForward] = {}
        self._inboxes = [
            Inbox(expected, partial(self._begin, source), place.post.runs_ahead)
            for source, expected in enumerate(plan.expected)
        ]
        self._actions: dict[str, Callable[[int, int], None]] = {
            FORWARD: self._forward,
            BACKWARD: self._backward,
            INPUT: self._backward_of_inputs,
            WEIGHT: self._backward_of_weights,
        }
        self.totals: list[Readout] = []
        """Summed loss terms of each piece, on the rank of the last stage."""
        self.timed: list[TimedAction] = []
        """Host times of each action, from the arrival of its input until its result was sent."""
        self.outputs: list[tuple[Any, Tensor]] = []
        """Outputs and totals of the checked pieces, kept until the loss is known to be a sum over samples."""

    def run_action(self, action: Action) -> None:
        """Runs one action of the schedule."""
        place = "of stage", action.stage, "micro-batch", action.micro
        with attending(self._pieces[action.micro].sequence), named_range(_RANGES[action.kind], *place):
            self._actions[action.kind](action.stage, action.micro)

    def _begin(self, source: int, action: Action) -> Callable[[], Any]:
        kind = FORWARD if action.kind == FORWARD else BACKWARD
        return self._post.begin(self._key(action.micro, kind, action.stage), source)

    def _key(self, micro: int, kind: str, stage: int) -> Any:
        return self._place.key(self._signatures[micro], kind, stage)

    def _arrived(self, kind: str, stage: int, micro: int) -> Any:
        """Waits for the message that stage ``stage`` sends after its action, and returns it."""
        return self._inboxes[stage % self._post.degree].receive(Action(kind, stage, micro))

    # Forward

    def _forward(self, stage: int, micro: int) -> None:
        came = self._arrived(FORWARD, stage - 1, micro) if stage else ((), [])
        began = time.perf_counter()
        inputs, received = _leaves(*came)
        piece, learner = self._pieces[micro], self._learner
        with self._watched(micro), learner.micro_scope(piece, self._step) as current:
            found = self._place.forward.run(stage, received, learner.task.forward, piece.inputs)
            if stage == self._last:
                total = term_of(learner.task.exact_loss(), found, piece)
        current.rewind()
        self._learner.work_timer.work_done()
        if stage == self._last:
            self._keep_total(found, total, micro)
            self._note(FORWARD, stage, micro, began)
            outputs = [total / self._divide()]
        else:
            outputs = self._send_on(stage, micro, found)
            self._note(FORWARD, stage, micro, began)
        self._divide()
        self._saved[stage, micro] = SavedForward(
            current, inputs, [each for each in outputs if each.requires_grad]
        )

    def _send_on(self, stage: int, micro: int, found: tuple[Any, ...]) -> list[Tensor]:
        # Split backward detaches outputs in place, which does not work for a view: sends copies.
        split = self._plan.backward == INPUT
        values = map_leaves(cloned, found) if split else found
        self._post.send(self._key(micro, FORWARD, stage), values, (stage + 1) % self._post.degree)
        return taken_apart(values)[1]

    def _keep_total(self, found: Any, total: Tensor, micro: int) -> None:
        self.totals.append(kept(total))
        if micro < self._looked_at:
            self.outputs.append((map_leaves(detached, found), total.detach()))

    def _divide(self) -> float:
        """Returns the divisor. All ranks ask for it after their first forward pass."""
        if self._divisor is None:
            self._divisor = self._ask()
        return self._divisor

    # Backward

    def _backward(self, stage: int, micro: int) -> None:
        saved = self._saved.pop((stage, micro))
        outputs, gradients = self._gradients(stage, micro, saved)
        began = time.perf_counter()
        with resumed(saved.scope):
            if outputs:
                torch.autograd.backward(outputs, gradients)
        self._send_back(stage, micro, saved)
        self._note(BACKWARD, stage, micro, began)

    def _gradients(
        self, stage: int, micro: int, saved: SavedForward
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """Returns the outputs that have a gradient, and their gradients."""
        if stage == self._last:
            return saved.outputs, None
        form, tensors = self._arrived(self._plan.backward, stage + 1, micro)
        came = zip(saved.outputs, put_together(form, tensors), strict=True)
        found = [(output, gradient) for output, gradient in came if gradient is not None]
        return [output for output, _ in found], [gradient for _, gradient in found]

    def _send_back(self, stage: int, micro: int, saved: SavedForward) -> None:
        self._learner.work_timer.work_done()
        if stage:
            gradients = tuple(leaf.grad for leaf in saved.inputs)
            self._post.send(self._key(micro, BACKWARD, stage), gradients, (stage - 1) % self._post.degree)

    def _backward_of_inputs(self, stage: int, micro: int) -> None:
        saved = self._saved[stage, micro]
        outputs, gradients = self._gradients(stage, micro, saved)
        began = time.perf_counter()
        with resumed(saved.scope):
            saved.groups = backward_of_inputs(outputs, gradients, saved.inputs, self._weights)
        self._send_back(stage, micro, saved)
        self._note(INPUT, stage, micro, began)

    def _backward_of_weights(self, stage: int, micro: int) -> None:
        saved = self._saved.pop((stage, micro))
        began = time.perf_counter()
        with resumed(saved.scope):
            backward_of_weights(saved.groups or [], self._weights)
        self._learner.work_timer.work_done()
        self._note(WEIGHT, stage, micro, began)

    @cached_property
    def _weights(self) -> list[torch.nn.Parameter]:
        return [p for p in self._learner.model.parameters() if p.requires_grad]

    def _note(self, kind: str, stage: int, micro: int, began: float) -> None:
        ended = time.perf_counter()
        self.timed.append(TimedAction(Action(kind, stage, micro), began - self._began, ended - self._began))

    # Checks

    @contextmanager
    def _watched(self, micro: int) -> Iterator[None]:
        """Looks for buffers that the second piece changes: the whole micro-batch would have changed them only once.

        Warns:
            UserWarning: On the rank of the stage that has such a buffer.
        """
        if micro != 1 or self._looked_at < 2:
            yield
            return
        with self._learner.loose_buffers.written() as names:
            yield
        if names:
            warnings.warn(
                f"buffer {names[0]} is written in each forward pass, of which one device takes one for a micro-batch "
                "and a pipeline one for each piece of it, which is another training. With microbatches=1, and "
                "micro_batch set to what fills the pipeline, each micro-batch stays whole",
                stacklevel=2,
            )

    def refusal(self, micro: MicroBatch) -> str | None:
        """Returns the reason why the pieces' losses do not add up to the whole micro-batch's; None if they do."""
        found, own, count = self.outputs, len(micro.samples), self._looked_at
        if not all(by_samples(outputs, _samples(outputs)) for outputs, _ in found) or own != sum(
            _samples(outputs) for outputs, _ in found
        ):
            return (
                "the model has outputs that are not one for each sample, and a pipeline cuts a micro-batch into "
                "pieces: have it take each as it is, with microbatches=1 and micro_batch set to what fills the pipeline"
            )
        with torch.no_grad(), self._learner.micro_scope(micro, self._step):
            whole = term_of(self._learner.task.exact_loss(), joined([outputs for outputs, _ in found]), micro)
        parts = torch.stack([total.reshape(()) for _, total in found]).sum().double()
        if torch.isclose(whole.reshape(()).double(), parts, rtol=1e-3, atol=1e-6 * own, equal_nan=True):
            return None
        return (
            f"the loss of {own} samples is {float(whole):g}, and the sum of those of its {count} pieces "
            f"{float(parts):g}: it looks at several samples together, which a pipeline cuts apart. Have it take each "
            "micro-batch as it is, with microbatches=1"
        )


def _leaves(form: Any, tensors: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Returns the received tensors that require a gradient, and the whole received tree. The stage may write to the
    tree:
    trained leaves in it are copies.
    """
    leaves = [
        tensor.requires_grad_(hole.trained) for tensor, hole in zip(tensors, holes_in(form), strict=True)
    ]
    free = [leaf.clone() if leaf.requires_grad else leaf for leaf in leaves]
    return [leaf for leaf in leaves if leaf.requires_grad], put_together(form, free)


def _samples(outputs: Any) -> int:
    """Returns the number of samples of the outputs, by their first tensor. Returns -1 if that has no rows."""
    first = next(iter(taken_apart(outputs)[1]), None)
    return len(first) if first is not None and first.ndim else -1
