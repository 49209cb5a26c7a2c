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
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from evener.distributed.environment import Environment
from evener.distributed.failure import is_communication_error
from evener.distributed.loop_watch import LoopWatch
from evener.errors import EvenerError
from evener.nn.dropout import drawing_apart
from evener.nn.fqn import clean_name
from evener.tools.verify.perturbation import disturb
from evener.tools.verify.trajectory import Sketch, Sketches, as_real
from evener.tools.verify_script.events import Event, Lines, Record, What

_OF_ONE_DEVICE: dict[str, Any] = {"balance": "equal"}
_OF_RANKS = ("balance", "caps", "quantum", "throttle", "throttle_at", "compress", "allreduce")
"""Settings of a loop that have no meaning on one device."""
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NOTHING = object()


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
    forgives: bool = False
    """Whether the script may fail after a pass that was cut short, as it does on one device."""


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
        self._steps_in_batch = self._most_in_batch = 0
        self._is_inside = False
        self._held: Sketches = {}  # weights when the batch at hand came, as long as no optimizer stepped
        self._norms: set[int] = set()

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
        if kind == "loader":
            read = made._reading
            made._reading = lambda: self._passing(read())
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
            self._look_at_models()
            self.record.start = self._sketches(self._parameters())
        self._drawn = _generators()
        self._most_in_batch = max(self._most_in_batch, self._steps_in_batch)
        self._steps_in_batch = self._most_in_batch if self._is_enough() else 0
        self.record.events.append(
            Event(What.BATCH, self._lines.here(), mark, weights=self._changed_by_hand())
        )

    def _changed_by_hand(self) -> Sketches:
        """The weights, if the loop has changed them since the last batch and uses no optimizer; that is an update."""
        if any(event.what is What.STEP for event in self.record.events):
            return {}
        before, self._held = self._held, self._sketches(self._parameters())
        if all(before[name].equal(value) for name, value in self._held.items() if name in before):
            return {}
        self._steps += 1
        return self._held

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
            stack.callback(register_module_forward_pre_hook(self._before_any_forward).remove)
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
            given = [*args, *kwargs.values()]
            event = self._add(what, _number(given[0] if given else None))
            weights = {id(p) for p in self._parameters().values()}
            event.of_weights = what is What.GRAD and any(id(t) in weights for t in _tensors(given[1:2]))
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
        event.rates = tuple(float(group.get("lr", math.nan)) for group in optimizer.param_groups)
        self._open[id(optimizer)] = event

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        event = self._open.pop(id(optimizer), None)
        if event is not None:
            event.weights = self._sketches(self._held_by(optimizer))
            self._steps += 1
            self._steps_in_batch += 1

    def _before_forward(self, model: nn.Module, *_: object) -> None:
        kind = next((p.device.type for p in model.parameters()), "cpu")
        if torch.is_autocast_enabled(kind):
            self.record.eps = max(self.record.eps, torch.finfo(torch.get_autocast_dtype(kind)).eps)

    def _before_any_forward(self, module: nn.Module, *_: object) -> None:
        if isinstance(module, _NORMS) and module.training and id(module) not in self._norms:
            self._norms.add(id(module))
            self._look_at_models()

    def _is_enough(self) -> bool:
        return self._steps >= self._plan.steps

    def _end_if_enough(self) -> None:
        """Before an update, or a backward pass: the batch at hand is done to its end, as far as can be foreseen."""
        if self._is_enough() and self._steps_in_batch >= self._most_in_batch:
            self.record.ended_by_limit = True
            raise Enough(0)

    def _passing(self, batches: Iterator[Any]) -> Iterator[Any]:
        """A pass through a prepared loader, which ends early after the steps that were asked for, the same in all runs.

        So what the script does when an epoch is over is compared, too: ``20 steps │ the end of the epoch │ ended by
        the first backward pass of the next``. Passes without training are whole before that, and short after it.
        """
        before = self._steps
        for number in count():
            found = next(batches, _NOTHING)
            if found is _NOTHING:
                break
            trains = self._steps > before
            is_long = self.record.cut and number >= self._plan.steps
            if self._is_enough() and (trains or is_long):
                self.record.cut = self.record.ended_by_limit = True
                break
            yield found
        self.record.passes += self._steps > before

    def forgives(self, error: BaseException) -> bool:
        """Whether a script may fail so: it had fewer batches than it was to have."""
        is_theirs = not isinstance(error, EvenerError) and not (
            isinstance(error, Exception) and is_communication_error(error)
        )
        if self.record.cut and is_theirs and (self._plan.alone or self._plan.forgives):
            self.record.failed_after_cut = True
        return self.record.failed_after_cut

    def _at_the_end(self) -> None:
        parameters = self._parameters()
        tensors = {**parameters, **self._buffers()}
        types = {p.dtype for p in parameters.values() if p.dtype.is_floating_point}
        own = max((torch.finfo(each).eps for each in types), default=2.0**-52)
        self.record.mixed = self.record.eps > own
        self.record.eps = max(self.record.eps, own)
        self.record.end = self._sketches(tensors)
        self.record.shapes |= {name: tuple(p.shape) for name, p in parameters.items()}
        self._look_at_models()
        digest = hashlib.sha256()
        for name, tensor in tensors.items():
            digest.update(name.encode())
            digest.update(
                as_real(tensor.detach()).cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
        self.record.digest = digest.hexdigest()

    def _look_at_models(self) -> None:
        """For what in them needs more than a rank's own samples, or draws for them."""
        known = {id(module) for model in self._models for module in model.modules()}
        self.record.norms = len(self._norms - known)
        self.record.dropouts = sum(map(drawing_apart, self._models))

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


def _tensors(given: Any) -> Iterator[Tensor]:
    """Those in nested lists and tuples."""
    if isinstance(given, Tensor):
        yield given
    for each in given if isinstance(given, list | tuple) else ():
        yield from _tensors(each)


def _generators() -> int:
    """A number that tells the states of the process's random generators from others."""
    state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state = zlib.crc32(torch.cuda.get_rng_state().numpy().tobytes(), state)
    return zlib.crc32(pickle.dumps((random.getstate(), np.random.get_state())), state)
