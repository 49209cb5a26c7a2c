"""Tasks with one fault each, on rank 1. Work is mostly sleep, which takes equally long on a busy machine."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from evener.core.task.task import Task
from evener.distributed.restart_count import generation
from evener.distributed.watchdog.watchdog import current_watchdog

WORK_SECONDS, FAULT_SECONDS = 0.012, 0.04
LEAK_NBYTES = 2 << 20
BULK_NBYTES = 1 << 20
"""Gradients that take long on a slow link."""
HANG_SECONDS = 3.0
"""The time limit of waits, after the start."""
CULPRIT = 1
_leaked: list[Tensor] = []


def is_culprit() -> bool:
    return os.environ.get("RANK") == str(CULPRIT)


class Work(torch.autograd.Function):
    """Does nothing, for a while, forward and backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return gradients[0], None, None


class Model(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.steps = 0
        if fault == "link":
            self.bulk = nn.Parameter(torch.zeros(BULK_NBYTES // 4))

    def forward(self, inputs: Tensor) -> Tensor:
        slow = {
            name: FAULT_SECONDS * (is_culprit() and self.fault == name) for name in ("forward", "backward")
        }
        if self.fault == "hang" and self.training:
            watchdog = current_watchdog()
            assert watchdog is not None
            watchdog.timeout_seconds = HANG_SECONDS
        if is_culprit() and self.training:
            self.steps += 1
            _do(self.fault, self.steps)
        hidden = self.first(inputs)
        times = (
            (WORK_SECONDS + slow["forward"], WORK_SECONDS + slow["backward"]) if self.training else (0.0, 0.0)
        )
        outputs = self.last(Work.apply(hidden, *times))  # type: ignore[no-untyped-call]
        return outputs + self.bulk.mean() if self.fault == "link" else outputs


def _do(fault: str, step: int) -> None:
    if fault == "leak":
        _leaked.append(torch.ones(LEAK_NBYTES // 4))
    elif fault == "threads":
        large = torch.ones(512, 512)
        for _ in range(4):
            large @ large
    elif fault == "death" and step == 14 and generation() == 0:
        os.kill(os.getpid(), 9)
    elif fault == "hang" and step == 14:
        time.sleep(1000)


class Samples(Dataset[Any]):
    def __init__(self, fault: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(48, 4, generator=generator)
        self.targets = torch.randint(3, (48,), generator=generator)
        self.fault = fault

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if is_culprit() and self.fault == "loader":
            time.sleep(FAULT_SECONDS / 2)
        return self.inputs[index], self.targets[index]


def _model(fault: str) -> nn.Module:
    _leaked.clear()
    if fault == "threads" and is_culprit():
        torch.set_num_threads(24)
    return Model(fault)


def task(fault: str = "none") -> Task:
    """Batches of 6: two samples for each of three ranks."""
    return Task(
        model=lambda: _model(fault),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        train=Samples(fault),
        batch_size=6,
        epochs=4,
        name="faulty",
    )
