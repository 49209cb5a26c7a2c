"""Records a run of a script on one rank."""

from __future__ import annotations

import hashlib
import math
import pickle
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from evener.components.sharded_tensor.local import local
from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.core.complex_numbers import as_real
from evener.distributed.environment import Environment
from evener.distributed.failure import is_communication_error
from evener.distributed.loop_watch import LoopWatch
from evener.distributed.mesh import DIVIDING_SAMPLES
from evener.errors import EvenerError
from evener.nn.dropout import drawing_apart
from evener.nn.fqn import clean_name
from evener.strategies.composed import degrees_of
from evener.tools.verify.perturbation import disturb
from evener.tools.verify.trajectory import RandomSketch, Sketches
from evener.tools.verify_script.events import Event, Record, ScriptLines, What, sizes_of
from evener.tools.verify_script.heard_loss import HeardLoss
from evener.torch_internals.autograd import is_within_transform
from evener.torch_internals.compiling import outside_of_graphs
from evener.training.prepare.prepare import place_or_none
from evener.training.prepare.sample_tensor import plain_of

_OF_ONE_DEVICE: dict[str, Any] = {"balance": "equal"}
_OF_RANKS = (
    *("balance", "max_shares", "share_multiple_of", "throttle", "throttle_at", "compress", "allreduce"),
    *("strategy", "strategy_option", "mesh"),
)
"""Settings of a loop that have no meaning on one device."""
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NOTHING = object()


@dataclass(frozen=True)
class RunPlan:
    """Settings of one recorded run."""

    steps: int
    """Optimizer steps after which the run ends."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of evener.prepare that replace those of the script."""
    alone: bool = False
    """True for a run on one device."""
    disturbed: int = 0
    """Seed of the disturbance of the weights; 0 for no disturbance."""
    strength: int = 1
    eps: float = 0.0
    forgives: bool = False
    """True if the script may fail after a pass that was cut short, because it also did on one device."""


class Enough(SystemExit):
    """Raised to end the script after the requested steps."""


class ScriptRecorder(LoopWatch):
    """Records what happens in this process, inside of :meth:`listening`.

    Args:
        plan: Settings of the run.
        lines: Finds lines of the script.
    """

    def __init__(self, plan: RunPlan, lines: ScriptLines) -> None:
        self._plan, self._lines = plan, lines
        self.environment = Environment() if plan.alone else None
        self.record = Record()
        self._models: list[nn.Module] = []
        self._undisturbed: list[nn.Module] = []
        self._close: Callable[[], None] | None = None
        self._open: dict[int, Event] = {}  # optimizer steps that have not ended
        self._sketch = RandomSketch()
        self._drawn = self._steps = 0
        self._steps_in_batch = self._most_in_batch = 0
        self._is_inside = False
        self._held: Sketches = {}  # weights at the start of the current batch, if no optimizer is used
        self._norms: set[int] = set()

    # Hooks of evener.prepare

    def settings(self, given: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in given.items() if not (self._plan.alone and name in _OF_RANKS)}
        return kept | (_OF_ONE_DEVICE if self._plan.alone else {}) | self._settings_for(kept.get("mesh"))

    def _settings_for(self, mesh: str | None) -> dict[str, Any]:
        """Returns the settings of the plan, with as many weights as a mesh has parts of a batch."""
        balance = self._plan.settings.get("balance")
        if mesh is None or balance is None:
            return self._plan.settings
        degrees = degrees_of(mesh)
        parts = math.prod(degrees.get(axis, 1) for axis in DIVIDING_SAMPLES)
        return self._plan.settings | {"balance": ",".join(balance.split(",")[:parts]) if parts > 1 else None}

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

    def batch(self, mark: Callable[[], float]) -> None:
        if self._plan.disturbed:
            generator = torch.Generator().manual_seed(self._plan.disturbed)
            for model in self._undisturbed:
                disturb(model, generator, self._plan.strength, self._plan.eps)
        self._undisturbed.clear()
        if not self.record.start:
            self._look_at_models()
            self.record.start = self._sketches(self._whole_parameters())
        self._drawn = _generators()
        self._most_in_batch = max(self._most_in_batch, self._steps_in_batch)
        self._steps_in_batch = self._most_in_batch if self._is_enough() else 0
        event = Event(What.BATCH, self._lines.here(), mark(), weights=self._changed_by_hand())
        event.sizes = self.record.sizes
        self.record.events.append(event)

    def _changed_by_hand(self) -> Sketches:
        """Returns the weights if the loop has changed them since the last batch and uses no optimizer, and counts an
        update. Otherwise returns no weights.
        """
        if any(event.what is What.STEP for event in self.record.events):
            return {}
        before, self._held = self._held, self._sketches(self._whole_parameters())
        if all(before[name].equal(value) for name, value in self._held.items() if name in before):
            return {}
        self._steps += 1
        return self._held

    def mean(self, value: Tensor) -> None:
        self.heard(value)

    # Events of the loop

    def heard(self, value: Any) -> None:
        """Records the ``value`` that a prepared loss or evener.global_mean returned."""
        if self._is_inside:
            return
        dims = value.dim() if isinstance(value, Tensor) else 0
        self._add(What.LOSS, _number(value), dims)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Records what happens inside the context."""
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
        """Records no events inside the context: they are part of another event, such as a ``grad`` in a prepared
        loss.
        """
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    def _around(self, name: str, what: What) -> Any:
        """Patches ``torch.autograd.backward`` or ``grad`` to record each call.

        Calls of ``grad`` for tensors that are no weights are no events: a rank may make one for each of its samples, as
        an inner step from clones of the weights.
        """
        original = getattr(torch.autograd, name)

        @outside_of_graphs
        def called(*args: Any, **kwargs: Any) -> Any:
            # What PyTorch calls by itself is no event: activation checkpointing in a backward pass, torch.func.grad.
            if self._is_inside or is_within_transform():
                return original(*args, **kwargs)
            self._end_if_enough()
            args, kwargs = tuple(map(_listed, args)), {name: _listed(each) for name, each in kwargs.items()}
            given = [*args, *kwargs.values()]
            weights = {id(p) for p in self._parameters().values()}
            of_weights = what is What.GRAD and any(id(t) in weights for t in _tensors(given[1:2]))
            if what is What.BACKWARD or of_weights:
                self._add(what, _number(given[0] if given else None))
            with self.inside():
                return original(*args, **kwargs)

        return patch.object(torch.autograd, name, called)

    def _add(self, what: What, value: float, dims: int = 0) -> Event:
        event = Event(what, self._lines.here(), value, dims, drew=_generators() != self._drawn)
        self.record.events.append(event)
        return event

    @outside_of_graphs
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._end_if_enough()
        named = self._held_by(optimizer)
        event = self._add(What.STEP, math.nan)
        gradients = ((name, p, plain_of(p.grad)) for name, p in named.items() if p.grad is not None)
        event.gradients = self._sketches({name: _whole(grad, p) for name, p, grad in gradients})
        event.rates = tuple(float(group.get("lr", math.nan)) for group in optimizer.param_groups)
        self._open[id(optimizer)] = event

    @outside_of_graphs
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if place_or_none() is None:  # else the weights may not be whole yet
            self.stepped(optimizer)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        event = self._open.pop(id(optimizer), None)
        if event is not None:
            event.weights = self._sketches(
                {name: _whole(p, p) for name, p in self._held_by(optimizer).items()}
            )
            self._steps += 1
            self._steps_in_batch += 1

    @outside_of_graphs
    def _before_forward(self, model: nn.Module, *_: object) -> None:
        kind = next((p.device.type for p in model.parameters()), "cpu")
        if torch.is_autocast_enabled(kind):
            self.record.eps = max(self.record.eps, torch.finfo(torch.get_autocast_dtype(kind)).eps)

    @outside_of_graphs
    def _before_any_forward(self, module: nn.Module, *_: object) -> None:
        if isinstance(module, _NORMS) and module.training and id(module) not in self._norms:
            self._norms.add(id(module))
            self._look_at_models()

    def _is_enough(self) -> bool:
        return self._steps >= self._plan.steps

    def _end_if_enough(self) -> None:
        """Ends the run after the requested steps, before an update or a backward pass. Before that, the current batch
        gets as many optimizer steps as the batches before it.
        """
        if self._is_enough() and self._steps_in_batch >= self._most_in_batch:
            self.record.ended_by_limit = True
            raise Enough(0)

    def _passing(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Passes the batches of a prepared loader through, and ends the pass early after the requested steps.

        All runs end the pass at the same batch. So the code that runs after an epoch is compared too: ``20 steps │ the
        end of the epoch │ ended by the first backward pass of the next``. Passes without training, such as evaluations,
        are complete before the limit and shortened after it.
        """
        before = self._steps
        for number in count():
            found = next(batches, _NOTHING)
            if found is _NOTHING:
                break
            is_long = self.record.cut and number >= self._plan.steps
            if self._is_enough() and (self._steps > before or is_long):
                self.record.cut = self.record.ended_by_limit = True
                break
            self.record.sizes = sizes_of(found)
            yield found
        self.record.passes += self._steps > before

    def forgives(self, error: BaseException) -> bool:
        """Returns True if the script may fail with this error, because a pass had fewer batches than it expected."""
        is_theirs = not isinstance(error, EvenerError) and not (
            isinstance(error, Exception) and is_communication_error(error)
        )
        if self.record.cut and is_theirs and (self._plan.alone or self._plan.forgives):
            self.record.failed_after_cut = True
        return self.record.failed_after_cut

    def _at_the_end(self) -> None:
        parameters = self._whole_parameters()
        buffers = {name: _whole(buffer, buffer) for name, buffer in self._buffers().items()}
        tensors = {**parameters, **buffers}
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
        """Counts the modules that need the samples of all ranks, or that draw random numbers on each rank."""
        known = {id(module) for model in self._models for module in model.modules()}
        self.record.norms = len(self._norms - known)
        self.record.dropouts = sum(map(drawing_apart, self._models))

    def _end(self) -> None:
        if self._close is not None:
            self._close()

    # Names of tensors

    def _held_by(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        names = {id(p): name for name, p in self._parameters().items()}
        groups = [group["params"] for group in optimizer.param_groups]
        found = {
            names.get(id(p), f"parameter {n} of group {g} of an optimizer"): p
            for g, parameters in enumerate(groups)
            for n, p in enumerate(parameters)
        }
        self.record.shapes.update((name, _whole_shape(p)) for name, p in found.items())
        return found

    def _parameters(self) -> dict[str, Tensor]:
        return self._named(nn.Module.named_parameters)

    def _whole_parameters(self) -> dict[str, Tensor]:
        return {name: _whole(p, p) for name, p in self._parameters().items()}

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


def _whole(value: Tensor, owner: Tensor) -> Tensor:
    """Returns ``value``, a rank's part like ``owner``, as one device has it. A collective call if it is divided."""
    place = place_or_none()
    return value if place is None else place.learner.whole(value, owner)


def _whole_shape(owner: Tensor) -> tuple[int, ...]:
    spec = shard_spec(owner)
    return tuple(owner.shape) if spec is None else spec.whole_shape(local(owner.detach()).shape)


def _number(roots: Any) -> float:
    """Returns the value of a scalar, or the sum of several. Returns NaN if one of them has dimensions or is complex."""
    each = list(roots) if isinstance(roots, list | tuple) else [roots]
    if not each or any(not isinstance(t, Tensor) or t.dim() or t.is_complex() for t in each):
        return math.nan
    return float(sum(float(t.detach()) for t in each))


def _listed(given: Any) -> Any:
    """Returns a tuple in the place of an iterator or a view, such as ``model.parameters()``, which can be read once."""
    is_one = isinstance(given, Tensor | Sequence | Mapping | str)
    return tuple(given) if isinstance(given, Iterable) and not is_one else given


def _tensors(given: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists and tuples."""
    if isinstance(given, Tensor):
        yield given
    for each in given if isinstance(given, list | tuple) else ():
        yield from _tensors(each)


def _generators() -> int:
    """Returns a checksum of the states of this process's random generators."""
    state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state = zlib.crc32(torch.cuda.get_rng_state().numpy().tobytes(), state)
    return zlib.crc32(pickle.dumps((random.getstate(), np.random.get_state())), state)
