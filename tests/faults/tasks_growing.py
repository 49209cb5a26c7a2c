"""A run that lasts until it is told to hurry, and whose ranks write down every sample that they compute.

The directory in ``EVENER__TESTS_FAULT`` has the journals, and the file ``hurry``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Subset

import evener
from evener.core.task.task import Task
from evener.distributed.launch import membership
from evener.training.builtin_tasks import digits
from tests.distributed import forked
from tests.faults.chaos import Numbered

SAMPLES, BATCH, EPOCHS = 240, 24, 8
STEPS = EPOCHS * SAMPLES // BATCH
_PACE = ((0.4, 0.1), (0.9, 1.0), (1.0, 30.0))
"""Up to which part of all its samples the run takes how many seconds a step: little while there are many left, so that
a rehearsal is short, and much at the end, so that the run outlasts one on a machine that does much else."""


def total(scores: Tensor, targets: Tensor) -> Tensor:
    home = Path(os.environ["EVENER__TESTS_FAULT"])
    if torch.is_grad_enabled():
        with (home / f"journal-{os.getpid()}").open("a") as file:
            file.write(json.dumps(targets[:, 1].tolist()) + "\n")
        _linger(home)
    return torch.nn.functional.cross_entropy(scores, targets[:, 0], reduction="sum")


def _linger(home: Path) -> None:
    texts = [path.read_text() for path in home.glob("journal-*")]
    done = sum(text.count(",") + text.count("\n") for text in texts) / (SAMPLES * EPOCHS)
    until = time.monotonic() + next(seconds for part, seconds in _PACE if min(done, 1.0) <= part)
    while time.monotonic() < until and not (home / "hurry").exists():
        time.sleep(0.02)


def hasty() -> None:
    """The program ``evener``, which admits a machine that comes half a second after a start instead of five."""
    membership._PAUSE_SECONDS = 0.5
    forked.command()


def linear() -> torch.nn.Module:
    """Another model, of which no launcher knows."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


def grows() -> Task:
    task = digits.task()
    model = linear if "EVENER__TESTS_OTHER" in os.environ else task.model
    return dataclasses.replace(
        task,
        model=model,
        train=Subset(Numbered(task.train), range(SAMPLES)),
        evaluate=None,
        loss=evener.loss(total=total, count=lambda targets: len(targets)),
        metrics={},
        batch_size=BATCH,
        epochs=EPOCHS,
    )
