"""A run that is slow until it is told to hurry, and whose ranks write down every sample that they compute.

The directory in ``EVENER__TESTS_FAULT`` has the journals, and the file ``hurry``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Subset

import evener
from evener.core.task.task import Task
from evener.training.builtin_tasks import digits
from tests.faults.chaos import Numbered

SAMPLES, BATCH, EPOCHS = 240, 24, 16
STEPS = EPOCHS * SAMPLES // BATCH
_FIRST, _FIRST_SECONDS, _LATER_SECONDS = 10, 0.3, 1.0
"""Later batches of a process take longer, so that the run outlasts its rehearsal."""
_taken = itertools.count()


def total(scores: Tensor, targets: Tensor) -> Tensor:
    home = Path(os.environ["EVENER__TESTS_FAULT"])
    if torch.is_grad_enabled():
        with (home / f"journal-{os.getpid()}").open("a") as file:
            file.write(json.dumps(targets[:, 1].tolist()) + "\n")
        if not (home / "hurry").exists():
            time.sleep(_FIRST_SECONDS if next(_taken) < _FIRST else _LATER_SECONDS)
    return torch.nn.functional.cross_entropy(scores, targets[:, 0], reduction="sum")


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
