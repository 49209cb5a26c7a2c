"""What a rank does in one step of a pipeline, action by action.

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

from evener.components.microbatches import by_samples, detached, joined
from evener.components.model_with_loss import term_of
from evener.components.tree_spec import holes_in, put_together, signature, taken_apart
from evener.data.batch import MicroBatch, map_leaves
from evener.hardware.async_read import Readout, kept
from evener.nn.attention_dispatch import attending
from evener.nn.context import Scope, resumed
from evener.strategies.learner import Learner
from evener.strategies.pipeline.p2p import Inbox
from evener.strategies.pipeline.p2p_trees import Post
from evener.strategies.pipeline.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Plan, Timed
from evener.strategies.pipeline.stage_forward import StagedForward
from evener.torch_internals.pipeline_backward import backward_of_inputs, backward_of_weights


@dataclass(frozen=True)
class Place:
    """What a rank of a pipeline works with."""

    learner: Learner
    forward: StagedForward
    post: Post

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.forward.stages)

    def key(self, inputs: str | None, kind: str, stage: int) -> Any:
        """What the form of a message follows from: the :func:`signature` of the model's inputs, and which it is."""
        return inputs, self.learner.model.training, torch.is_grad_enabled(), kind, stage


@dataclass
class Saved:
    """Of a forward pass, until its backward."""

    scope: Scope
    inputs: list[Tensor]
    """Which came from the stage before, and want a gradient."""
    outputs: list[Tensor]
    """Which want a gradient: the loss, or what was handed on."""
    groups: list[dict[str, Any]] | None = None
    """What the gradients of the weights are made of, where they come later than those of the inputs."""


class Turn:
    """One step of a rank.

    Args:
        pieces: All micro-batches of the step.
        divisor: See :class:`evener.strategies.interfaces.Stepper`.
        looked_at: How many of the first pieces are those of one micro-batch, if it is to be seen whether they come to
            what the whole would; 0 if not.
    """

    def __init__(
        self,
        place: Place,
        plan: Plan,
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
        self._saved: dict[tuple[int, int], Saved] = {}
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
        """Of the last stage."""
        self.timed: list[Timed] = []
        """On the host, when each action ran, from when what it needs had come until what it made was sent."""
        self.outputs: list[tuple[Any, Tensor]] = []
        """Of the pieces looked at and their totals, until it is known that the loss is a sum over samples."""

    def take(self, action: Action) -> None:
        """Does what the schedule says."""
        with attending(self._pieces[action.micro].sequence):
            self._actions[action.kind](action.stage, action.micro)

    def _begin(self, source: int, action: Action) -> Callable[[], Any]:
        kind = FORWARD if action.kind == FORWARD else BACKWARD
        return self._post.begin(self._key(action.micro, kind, action.stage), source)

    def _key(self, micro: int, kind: str, stage: int) -> Any:
        return self._place.key(self._signatures[micro], kind, stage)

    def _arrived(self, kind: str, stage: int, micro: int) -> Any:
        """What stage ``stage`` sent of its action."""
        return self._inboxes[stage % self._post.degree].take(Action(kind, stage, micro))

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
        self._learner.pace.work_done()
        if stage == self._last:
            self._keep_total(found, total, micro)
            self._note(FORWARD, stage, micro, began)
            outputs = [total / self._divide()]
        else:
            outputs = self._send_on(stage, micro, found)
            self._note(FORWARD, stage, micro, began)
        self._divide()
        self._saved[stage, micro] = Saved(current, inputs, [each for each in outputs if each.requires_grad])

    def _send_on(self, stage: int, micro: int, found: tuple[Any, ...]) -> list[Tensor]:
        # Copies where backward comes in two parts, which detaches them: a view cannot be.
        split = self._plan.backward == INPUT
        values = (
            map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, found)
            if split
            else found
        )
        self._post.send(self._key(micro, FORWARD, stage), values, (stage + 1) % self._post.degree)
        return taken_apart(values)[1]

    def _keep_total(self, found: Any, total: Tensor, micro: int) -> None:
        self.totals.append(kept(total))
        if micro < self._looked_at:
            self.outputs.append((map_leaves(detached, found), total.detach()))

    def _divide(self) -> float:
        """The divisor, which all ranks ask for after their first forward pass."""
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

    def _gradients(self, stage: int, micro: int, saved: Saved) -> tuple[list[Tensor], list[Tensor] | None]:
        """The outputs that have a gradient, and it."""
        if stage == self._last:
            return saved.outputs, None
        form, tensors = self._arrived(self._plan.backward, stage + 1, micro)
        came = zip(saved.outputs, put_together(form, tensors), strict=True)
        found = [(output, gradient) for output, gradient in came if gradient is not None]
        return [output for output, _ in found], [gradient for _, gradient in found]

    def _send_back(self, stage: int, micro: int, saved: Saved) -> None:
        self._learner.pace.work_done()
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
        self._learner.pace.work_done()
        self._note(WEIGHT, stage, micro, began)

    @cached_property
    def _weights(self) -> list[torch.nn.Parameter]:
        return [p for p in self._learner.model.parameters() if p.requires_grad]

    def _note(self, kind: str, stage: int, micro: int, began: float) -> None:
        ended = time.perf_counter()
        self.timed.append(Timed(Action(kind, stage, micro), began - self._began, ended - self._began))

    # What is refused

    @contextmanager
    def _watched(self, micro: int) -> Iterator[None]:
        """Looks for buffers to which the second piece gives other values: the whole would have given the first alone.

        Warns:
            UserWarning: On the rank of that stage, if there is one.
        """
        if micro != 1 or self._looked_at < 2:
            yield
            return
        before = [(buffer, buffer.clone()) for buffer in self._learner.loose_buffers()]
        yield
        changed = [held for held, old in before if held.shape == old.shape and not torch.equal(held, old)]
        for name, buffer in self._learner.model.named_buffers() if changed else ():
            if any(buffer is each for each in changed):
                warnings.warn(
                    f"buffer {name} is written in each forward pass, of which one device takes one for a micro-batch "
                    "and a pipeline one for each piece of it, which is another training. With microbatches=1, and "
                    "micro_batch set to what fills the pipeline, each micro-batch stays whole",
                    stacklevel=2,
                )
                return

    def refusal(self, micro: MicroBatch) -> str | None:
        """Why the loss is not that of the whole micro-batch, whose pieces were looked at."""
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
    """Those of what came that want a gradient, and all of it for the calls of a stage, which may write to it."""
    leaves = [
        tensor.requires_grad_(hole.trained) for tensor, hole in zip(tensors, holes_in(form), strict=True)
    ]
    free = [leaf.clone() if leaf.requires_grad else leaf for leaf in leaves]
    return [leaf for leaf in leaves if leaf.requires_grad], put_together(form, free)


def _samples(outputs: Any) -> int:
    """By the first tensor; -1 where it has no rows."""
    first = next(iter(taken_apart(outputs)[1]), None)
    return len(first) if first is not None and first.ndim else -1
