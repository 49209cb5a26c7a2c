"""Takes the steps of one run and records losses, gradients and final weights for a comparison.

The gradients that the optimizer sees are recorded in every step, but each only as a *sketch*: its elements with random
signs, summed in :data:`WIDTH` bins. The sketch of a difference is the difference of the sketches, and its norm is that
of the difference within some 20 %. So an error in any element of any gradient of any step shows, for 128 bytes. Weights
alone would not be enough: Adam takes the same step for a gradient of half the size.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from evener import checkpoint
from evener.components.optim.eight_bit import has_other_blocks
from evener.core.complex_numbers import as_real
from evener.core.config.run_config import RunConfig
from evener.core.task.task import TaskLike, resolve
from evener.data.batch import Batch
from evener.distributed.environment import Environment
from evener.distributed.session import Session
from evener.nn.dropout import drawing_apart
from evener.nn.fqn import clean_name
from evener.training.builtin_tasks import BUILT_IN
from evener.training.engine import Engine
from evener.training.step.step import Step

WIDTH = 16
"""Numbers in a sketch. A tensor with no more elements is its own sketch."""

Sketches = dict[str, Tensor]
"""Sketches by name, in float64, of shape ``(WIDTH,)`` or shorter. A parameter without a gradient has no entry."""


@dataclass(frozen=True)
class Trajectory:
    """Record of the steps of one rank."""

    losses: list[float]
    weights: dict[str, Tensor]
    """Parameters and buffers at the end. Rank 0 alone keeps these and the fields below, except ``digest`` and
    ``drawing_apart``.
    """
    digest: str
    drawing_apart: int = 0
    """Number of modules with dropout that draws different masks on each rank."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the parameters, in the order of the model."""
    gradients: list[Sketches] = field(default_factory=list)
    """Gradients that the optimizer got, by step."""
    moved: dict[str, float] = field(default_factory=dict)
    """Distance of each parameter from its start, as a 2-norm."""
    penalty: Sketches = field(default_factory=dict)
    """Gradients of the task's penalty in the first step. Only for a run on one device: other ranks may hold shards, on
    which the penalty need not be defined.
    """
    buffers: Sketches = field(default_factory=dict)
    """Buffers after the first step."""
    other_blocks: bool = False
    """True if the optimizer keeps one scale per block of numbers, and blocks differ because weights are sharded."""
    updated: list[Sketches] = field(default_factory=list)
    """Weights after each step, for runs that record them."""
    places: list[str] = field(default_factory=list)
    """Label of each step's loss, if a run has several losses. Each label has a floor of its own."""


Batches = Callable[[Engine], Iterator[Batch]]
"""Gets an engine before its first step, and returns the batches to take steps with."""


def record(
    task: TaskLike,
    options: Mapping[str, Any] | None,
    config: RunConfig,
    environment: Environment | None = None,
    batches: Batches = Engine.batches,
    stepped: Callable[[int], None] = lambda steps: None,
) -> Trajectory:
    """Takes the steps of ``config`` on this rank and records them. Rank 0 calls ``stepped`` with the number so far."""
    with (
        Session(
            device=config.device, timeout_seconds=config.timeout_seconds, environment=environment
        ) as session,
        Engine(resolve(task, BUILT_IN, options)(), config, session=session) as engine,
    ):
        engine.learner.synchronizer.alone()  # as in a real run
        chosen = batches(engine)
        recorder = TrajectoryRecorder(engine)
        steps = recorder.seen(engine.step(batch) for batch in chosen)
        return recorder.trajectory(list(_losses(_told(steps, stepped) if session.rank == 0 else steps)))


def _told(steps: Iterator[Step], stepped: Callable[[int], None]) -> Iterator[Step]:
    for number, step in enumerate(steps, 1):
        stepped(number)
        yield step


def _losses(steps: Iterator[Step]) -> Iterator[float]:
    """Reads each loss one step late, as in training, so that no rank has to wait for it."""
    last: Step | None = None
    for step in steps:
        if last is not None:
            yield last.loss
        last = step
    if last is not None:
        yield last.loss


class TrajectoryRecorder:
    """Records the steps of an engine from its creation on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._learner = engine.learner
        self._leads = engine.session.rank == 0
        start = self._learner.tensors()  # collective: all ranks gather their shards
        self._start = _copies(start) if self._leads else {}
        self._sketch = RandomSketch()
        self._gradients: list[Sketches] = []
        self._early: dict[Tensor, Tensor] = {}  # gradients of updates that run during backward
        self._penalty: Sketches = {}
        self._buffers: Sketches = {}
        self._updating = self._learner.stepper.outer or self._learner.optimizer
        self._updating.register_step_pre_hook(self._before_update)

    def seen(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Passes the steps through. Records the buffers after the first step. All ranks must call this together."""
        for number, step in enumerate(steps):
            if not number:
                named = self._engine.model.named_buffers(remove_duplicate=False)
                whole = {name: dense(self._learner.whole(buffer, buffer)) for name, buffer in named}
                self._buffers = {
                    clean_name(name): self._sketch(name, buffer) for name, buffer in whole.items()
                }
            yield step

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer is not self._updating:  # an update of some parameters during backward
            held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._early.update((p, p.grad.detach().clone()) for p in held)
            return
        task = self._engine.task
        if not self._gradients and task.penalty is not None and self._engine.session.world_size == 1:
            self._penalty = self._of_penalty(task.penalty)
        pairs = [(name, p, self._early.get(p, p.grad)) for name, p in self._parameters()]
        self._gradients.append(
            {name: self._sketch(name, self._whole(g, p)) for name, p, g in pairs if g is not None}
        )
        self._early.clear()

    def _whole(self, gradient: Tensor, parameter: Tensor) -> Tensor:
        return self._learner.whole(dense(gradient), parameter)

    def _of_penalty(self, penalty: Callable[[nn.Module], Tensor]) -> Sketches:
        named = [(name, p) for name, p in self._parameters() if p.requires_grad]
        with torch.enable_grad():
            term = penalty(self._engine.model)
        gradients = torch.autograd.grad(term, [p for _, p in named], allow_unused=True)
        return {
            name: self._sketch(name, g)
            for (name, _), g in zip(named, gradients, strict=True)
            if g is not None
        }

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        named = self._engine.model.named_parameters(remove_duplicate=False)
        return ((clean_name(name), parameter) for name, parameter in named)

    def trajectory(self, losses: list[float]) -> Trajectory:
        """Returns the record. All ranks must call this together after the last step."""
        named = self._learner.tensors()
        digest, dropouts = checkpoint.weights_digest(named), drawing_apart(self._engine.model)
        if not self._leads:
            return Trajectory(losses, {}, digest, dropouts)
        weights = _copies(named)
        shapes = {name: tuple(weights[name].shape) for name, _ in self._parameters()}
        return Trajectory(
            losses,
            weights,
            digest,
            dropouts,
            shapes,
            self._gradients,
            {name: float((weights[name].double() - self._start[name].double()).norm()) for name in shapes},
            self._penalty,
            self._buffers,
            has_other_blocks(self._learner.optimizer, self._engine.model),
        )


class RandomSketch:
    """Computes ``sketch(name, tensor)``. The same name has the same random signs in every process."""

    def __init__(self) -> None:
        self._signs: dict[str, Tensor] = {}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
        flat = as_real(dense).double().cpu().flatten()
        if flat.numel() <= WIDTH:
            return flat.clone()
        if name not in self._signs:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randint(2, flat.shape, generator=generator, dtype=torch.int8)
            self._signs[name] = drawn.mul_(2).sub_(1)
        signed = flat * self._signs[name]
        return nn.functional.pad(signed, (0, -flat.numel() % WIDTH)).view(WIDTH, -1).sum(1)


def _copies(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: as_real(dense(value.detach())).cpu().clone() for name, value in named.items()}


def dense(tensor: Tensor) -> Tensor:
    """Returns the tensor as a dense one. Buffers may be sparse, such as the edges of a graph."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()
