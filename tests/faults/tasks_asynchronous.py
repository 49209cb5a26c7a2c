"""A task whose ranks stall and die at random moments of asynchronous training, by the seed in a file."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener.core.task.task import Task
from evener.distributed.environment import detect

SAMPLES, BATCH_SIZE = 240, 12


class Mortal(nn.Module):
    """Stalls in some passes. Kills its process while ``deaths`` are left in the file of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.1)
        self._draw = random.Random()
        self._file = Path(os.environ["EVENER__TESTS_FAULT"]) / "chaos.json"

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and self._file.exists():
            self._suffer(json.loads(self._file.read_text()))
        return self.last(self.drop(torch.tanh(self.norm(self.first(inputs)))))

    def _suffer(self, chaos: dict[str, Any]) -> None:
        rank = detect().rank
        if not self._draw.random() < 0.05:
            return
        time.sleep(self._draw.choice([0.0, 0.01, 0.05]))
        left = self._file.with_name(f"deaths-{rank}")
        if rank in chaos["ranks"] and left.exists() and (deaths := int(left.read_text())):
            left.write_text(str(deaths - 1))
            os.kill(os.getpid(), signal.SIGKILL)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def mortal() -> Task:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    targets = (inputs[:, :3].argmax(dim=1)).long()
    return Task(
        model=Mortal,
        train=TensorDataset(inputs, targets),
        loss=nn.CrossEntropyLoss(),
        optimizer=adam,
        scheduler=decaying,
        scheduler_interval="step",
        batch_size=BATCH_SIZE,
    )


class Slow(nn.Linear):
    """Takes 20 ms for a sample. Makes the file of the fault in its first pass."""

    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            Path(os.environ["EVENER__TESTS_FAULT"]).write_text("slow")
            time.sleep(0.02 * len(inputs))
        return super().forward(inputs)


def slow() -> Task:
    return replace(mortal(), model=Slow)
