"""A task in which ranks die, each once, at several places; its model holds all that a rank can hold by itself."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.core.task.task import Task
from evener.distributed.environment import detect
from evener.distributed.restart_count import generation
from evener.nn.context import current
from tests.faults import tasks

DEATHS = {"forward": 1, "backward": 2, "update": 0, "raise": 1, "evaluation": 0, "joint update": 0}
"""By place, the rank that dies there: once, if a file of that name is in the test's directory."""
STEPS = {"forward": 3, "backward": 6, "update": 9, "raise": 12, "joint update": 5}
"""Steps that each rank has taken when one dies, by place; there are four in an epoch."""
EVALUATION = 14


def dies(place: str) -> bool:
    """Whether it is the turn of this rank, which is never again."""
    turn = Path(os.environ["EVENER__TESTS_FAULT"]) / place
    if DEATHS[place] != detect().rank or not turn.exists():
        return False
    turn.unlink()
    return True


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Holds(nn.Module):
    """Draws from PyTorch's own generator, and counts its passes in a buffer that nothing keeps equal."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            if self.passes >= EVALUATION and dies("evaluation"):
                die()
            return x
        self.passes += 1
        taken = int(self.passes) - 1
        if taken == STEPS["forward"] and dies("forward"):
            die()
        if taken == STEPS["raise"] and dies("raise"):
            raise RuntimeError("no luck")
        out: Tensor = self.dropout(x)
        if taken == STEPS["backward"] and dies("backward"):
            out.register_hook(lambda _: die())
        return out


class Adam(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        done = super().step(closure)
        taken = int(next(iter(self.state.values()))["step"]) - 1
        for place in ("update", "joint update"):
            if taken == STEPS[place] and dies(place):
                die()
        return done


class JointAdam(Adam):
    """Waits for all ranks in its step, as optimizers do that divide their work."""

    def step(self, closure: Any = None) -> Any:
        done = super().step(closure)
        dist.all_reduce(torch.zeros(1))
        return done


def holds() -> Task:
    return tasks.task(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), Holds(), nn.Tanh(), nn.Linear(8, 3)),
        optimizer=lambda parameters: Adam(parameters, lr=0.02),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.95),
        scheduler_interval="step",
        batch_size=12,
        epochs=5,
    )


def joint() -> Task:
    return replace(holds(), optimizer=lambda parameters: JointAdam(parameters, lr=0.02))


def dies_twice() -> Task:
    """Rank 1 dies in a step, and the one in its place before it has come to any."""
    if detect().rank == 1 and generation() == 1:
        die()
    return holds()


class DiesInStep(nn.Module):
    """As ``Holds``, without buffers: knows the step by the scope."""

    def forward(self, x: Tensor) -> Tensor:
        scope = current()
        step = scope.step if scope is not None and self.training else None
        if step == STEPS["forward"] and dies("forward"):
            die()
        if step == STEPS["backward"] and dies("backward"):
            x.register_hook(lambda _: die())
        return x


def grains() -> Task:
    """For runs that are exact in bits."""
    layers = lambda: nn.Sequential(nn.Linear(6, 8), DiesInStep(), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3))  # noqa: E731
    return tasks.task(
        model=layers, optimizer=lambda parameters: Adam(parameters, lr=0.02), batch_size=12, epochs=5
    )


with torch.random.fork_rng():
    torch.manual_seed(0)
    ONE = nn.Sequential(nn.Linear(6, 8), Holds(), nn.Tanh(), nn.Linear(8, 3))


def one_module() -> Task:
    """Whose model is made when its module is imported, once in a process."""
    return tasks.task(model=lambda: ONE, epochs=5)
