"""The watch that remembers a run of a script on one rank."""

from __future__ import annotations

import hashlib
import math
import pickle
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from evener.nn.dropout import drawing_apart
from evener.nn.names import clean_name
from evener.runtime.environment import Environment
from evener.runtime.loop_watch import LoopWatch
from evener.verification.disturbing import disturb
from evener.verification.recording import Sketch, Sketches, as_real
from evener.verification.script.events import Event, Lines, Record, What

_OF_ONE_DEVICE: dict[str, Any] = {"balance": "equal"}
_OF_RANKS = ("balance", "caps", "quantum", "throttle", "throttle_at", "compress", "allreduce")
"""Settings of a loop that have no meaning on one device."""


@dataclass(frozen=True)
class Plan:
    """What a run does."""

    steps: int
    """Steps of optimizers after which it ends."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of evener.prepare, in place of those that the script gives."""
    alone: bool = False
    """Whether it is on one device."""
    disturbed: int = 0
    """The seed of the disturbance of its weights; 0 for none."""
    strength: int = 1
    eps: float = 0.0


class Enough(SystemExit):
    """The script has taken the steps that it was to take."""


class Recorder(LoopWatch):
    """Remembers what happens in this process; switched on by :meth:`listening`.

    Args:
        lines: Finds lines of the script.
    """

    def __init__(self, plan: Plan, lines: Lines) -> None:
        self._plan, self._lines = plan, lines
        self.environment = Environment() if plan.alone else None
        self.record = Record()
        self._models: list[nn.Module] = []
        self._undisturbed: list[nn.Module] = []
        self._close: Callable[[], None] | None = None
        self._open: dict[int, Event] = {}  # steps of optimizers that are not over
        self._sketch = Sketch()
        self._drawn = 0
        self._steps = 0
        self._is_inside = False

    # What a preparation asks

    def settings(self, given: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in given.items() if not (self._plan.alone and name in _OF_RANKS)}
        return kept | (_OF_ONE_DEVICE if self._plan.alone else {}) | self._plan.settings

    def opened(self, close: Callable[[], None]) -> None:
        self._close = close

    def prepared(self, kind: str, given: Any, made: Any) -> Any:
        if kind == "model" and not any(made is model for model in self._models):
            self._models.append(made)
            self._undisturbed.append(made)
            self.record.prepared = True
            made.register_forward_pre_hook(self._before_forward)
        if kind == "loss":
            return HeardLoss(given if self._plan.alone and callable(given) else made, made, self)
        return made

    def batch(self, mark: float) -> None:
        if self._plan.disturbed:
            generator = torch.Generator().manual_seed(self._plan.disturbed)
            for model in self._undisturbed:
                disturb(model, generator, self._plan.strength, self._plan.eps)
        self._undisturbed.clear()
        if not self.record.start:
            self.record.start = self._sketches(self._parameters())
        self._drawn = _generators()
        self.record.events.append(Event(What.BATCH, self._lines.here(), mark))

    def mean(self, value: Tensor) -> None:
        self.heard(value)

    # What the loop does

    def heard(self, value: Any) -> None:
        """A prepared loss, or evener.global_mean, has returned ``value``."""
        if self._is_inside:
            return
        dims = value.dim() if isinstance(value, Tensor) else 0
        self._add(What.LOSS, _number(value), dims)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Remembers what happens inside."""
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            stack.enter_context(self._around("backward", What.BACKWARD))
            stack.enter_context(self._around("grad", What.GRAD))
            stack.callback(self._end)
            yield
            self._at_the_end()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What happens inside is part of an event, and none itself: a prepared loss may be tried by ``grad``."""
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    def _around(self, name: str, what: What) -> Any:
        """Has ``torch.autograd.backward`` and ``grad`` tell of what they are called for."""
        original = getattr(torch.autograd, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:  # as activation checkpointing is inside of a backward pass
                return original(*args, **kwargs)
            self._end_if_enough()
            self._add(what, _number(args[0] if args else kwargs.get("tensors")))
            with self.inside():
                return original(*args, **kwargs)

        return patch.object(torch.autograd, name, called)

    def _add(self, what: What, value: float, dims: int = 0) -> Event:
        event = Event(what, self._lines.here(), value, dims, drew=_generators() != self._drawn)
        self.record.events.append(event)
        return event

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._end_if_enough()
        named = self._held_by(optimizer)
        event = self._add(What.STEP, math.nan)
        event.gradients = self._sketches({n: p.grad for n, p in named.items() if p.grad is not None})
        self._open[id(optimizer)] = event

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        event = self._open.pop(id(optimizer), None)
        if event is not None:
            event.weights = self._sketches(self._held_by(optimizer))
            self._steps += 1

    def _before_forward(self, model: nn.Module, *_: object) -> None:
        kind = next((p.device.type for p in model.parameters()), "cpu")
        if torch.is_autocast_enabled(kind):
            self.record.eps = max(self.record.eps, torch.finfo(torch.get_autocast_dtype(kind)).eps)

    def _end_if_enough(self) -> None:
        if self._steps >= self._plan.steps:
            self.record.ended_by_limit = True
            raise Enough(0)

    def _at_the_end(self) -> None:
        parameters = self._parameters()
        tensors = {**parameters, **self._buffers()}
        types = {p.dtype for p in parameters.values() if p.dtype.is_floating_point}
        own = max((torch.finfo(each).eps for each in types), default=2.0**-52)
        self.record.mixed = self.record.eps > own
        self.record.eps = max(self.record.eps, own)
        self.record.end = self._sketches(tensors)
        self.record.shapes |= {name: tuple(p.shape) for name, p in parameters.items()}
        self.record.dropouts = sum(map(drawing_apart, self._models))
        digest = hashlib.sha256()
        for name, tensor in tensors.items():
            digest.update(name.encode())
            digest.update(
                as_real(tensor.detach()).cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
        self.record.digest = digest.hexdigest()

    def _end(self) -> None:
        if self._close is not None:
            self._close()

    # Names

    def _held_by(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        names = {id(p): name for name, p in self._parameters().items()}
        groups = [group["params"] for group in optimizer.param_groups]
        found = {
            names.get(id(p), f"parameter {n} of group {g} of an optimizer"): p
            for g, parameters in enumerate(groups)
            for n, p in enumerate(parameters)
        }
        self.record.shapes.update((name, tuple(p.shape)) for name, p in found.items())
        return found

    def _parameters(self) -> dict[str, Tensor]:
        return self._named(nn.Module.named_parameters)

    def _buffers(self) -> dict[str, Tensor]:
        return self._named(nn.Module.named_buffers)

    def _named(self, named: Callable[[nn.Module], Iterator[tuple[str, Tensor]]]) -> dict[str, Tensor]:
        several = len(self._models) > 1
        return {
            f"model {n}: {clean_name(name)}" if several else clean_name(name): tensor
            for n, model in enumerate(self._models)
            for name, tensor in named(model)
        }

    def _sketches(self, named: dict[str, Tensor]) -> Sketches:
        return {name: self._sketch(f"{name} {tuple(tensor.shape)}", tensor) for name, tensor in named.items()}


class HeardLoss:
    """A loss whose values are remembered.

    Args:
        loss: What is called.
        made: Has everything else.
    """

    def __init__(self, loss: Any, made: Any, recorder: Recorder) -> None:
        self._loss, self._made, self._recorder = loss, made, recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._loss, nn.Module):  # its class weights
            self._loss.to(next((each.device for each in args if isinstance(each, Tensor)), "cpu"))
        with self._recorder.inside():
            value = self._loss(*args, **kwargs)
        self._recorder.heard(value)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of copying and pickling, before anything is there
            raise AttributeError(name)
        return getattr(self._made, name)


def _number(roots: Any) -> float:
    """The value of a loss or a root, the sum of several; NaN for what has dimensions."""
    each = list(roots) if isinstance(roots, list | tuple) else [roots]
    if not each or any(not isinstance(t, Tensor) or t.dim() or t.is_complex() for t in each):
        return math.nan
    return float(sum(float(t.detach()) for t in each))


def _generators() -> int:
    """A number that tells the states of the process's random generators from others."""
    state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state = zlib.crc32(torch.cuda.get_rng_state().numpy().tobytes(), state)
    return zlib.crc32(pickle.dumps((random.getstate(), np.random.get_state())), state)
