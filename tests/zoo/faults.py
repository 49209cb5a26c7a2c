"""Deliberate errors. Each gets the engine of a divided run before its first step, and gives the batches to step with.

They act from outside, on gradients that the ranks have summed already, on batches and on modules, so that they hold
for any strategy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from evener.data.batch import Batch
from evener.training.engine import Engine


def before_update(engine: Engine, act: Callable[[int], None]) -> None:
    """Calls ``act(step)`` when the gradients are summed, before the optimizer sees them."""
    steps = iter(range(10**9))
    engine.learner.optimizer.register_step_pre_hook(lambda *_: act(next(steps)))


@torch.no_grad()
def scale_gradients(engine: Engine, factor: float, only: str | None = None) -> None:
    for name, parameter in engine.model.named_parameters():
        if parameter.grad is not None and only in (None, name):
            parameter.grad.mul_(factor)


def averaged(engine: Engine) -> Iterator[Batch]:
    """Every rank's gradients averaged instead of summed."""
    before_update(engine, lambda step: scale_gradients(engine, 1 / engine.session.world_size))
    return engine.batches()


@dataclass(frozen=True)
class Scaled:
    """The gradient of one parameter is off by a factor."""

    name: str
    factor: float = 1 + 1e-6

    def __call__(self, engine: Engine) -> Iterator[Batch]:
        before_update(engine, lambda step: scale_gradients(engine, self.factor, self.name))
        return engine.batches()


def counted_twice(engine: Engine) -> Iterator[Batch]:
    """The gradients of the second step count twice."""
    before_update(engine, lambda step: scale_gradients(engine, 2.0 if step == 1 else 1.0))
    return engine.batches()


def trained_twice(engine: Engine) -> Iterator[Batch]:
    """The second step takes the samples of the first again."""

    def batches() -> Iterator[Batch]:
        first: Batch | None = None
        for number, batch in enumerate(engine.batches()):
            first = first or batch
            yield dataclasses.replace(batch, micro_batches=first.micro_batches) if number == 1 else batch

    return batches()


def penalty_per_rank(engine: Engine) -> Iterator[Batch]:
    """The penalty's gradient counts once a rank."""
    before_update(engine, lambda step: _add_penalty(engine, engine.session.world_size - 1))
    return engine.batches()


def _add_penalty(engine: Engine, times: int) -> None:
    assert engine.task.penalty is not None
    parameters = [p for p in engine.model.parameters() if p.grad is not None]
    with torch.enable_grad():
        term = engine.task.penalty(engine.model) * times
    for parameter, gradient in zip(parameters, torch.autograd.grad(term, parameters), strict=True):
        assert parameter.grad is not None
        parameter.grad += gradient


@dataclass(frozen=True)
class LocalStatistics:
    """One BatchNorm, counted from the first, takes the statistics of its rank's samples."""

    number: int

    def __call__(self, engine: Engine) -> Iterator[Batch]:
        norms = [module for module in engine.model.modules() if isinstance(module, _BatchNorm)]
        chosen = norms[self.number]
        chosen.forward = MethodType(_local, chosen)  # type: ignore[method-assign]
        return engine.batches()


def _local(norm: _BatchNorm, x: Tensor) -> Tensor:
    """Its running statistics stay as they are: not even the buffers tell the ranks apart."""
    return F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
