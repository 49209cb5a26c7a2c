"""A run whose ranks are killed at random: a script, and a journal of every sample that it trained on."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import evener
from evener.core.observer import Observer
from evener.core.records import RunStart
from evener.core.task.task import Task
from evener.distributed.environment import detect
from evener.distributed.launch.rendezvous import Rendezvous
from evener.training.builtin_tasks import digits

PROCESSES, EPOCHS = 3, 30


class Numbered(Dataset[Any]):
    """The digits, whose targets are their class and their number."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        image, label = self.inner[index]
        return image, torch.tensor([int(label), index])


class Journal(Observer):
    """After which step this start of the rank began, and the samples of each of its steps since then.

    A line for each pass: ``[start, rank, step before the first, pass, samples]``. Of a pass that was begun by several
    starts the last one's is what the weights know.
    """

    everywhere = True
    _now: Journal | None = None

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def start(self, run: RunStart) -> None:
        self.first, self.passes = run.steps_done, 0
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.rank = detect().rank
        Journal._now = self

    @classmethod
    def write(cls, samples: list[int]) -> None:
        if (journal := cls._now) is None:
            return
        line = [journal.attempt, journal.rank, journal.first + journal.passes, samples]
        with (journal.directory / f"journal-{journal.rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        journal.passes += 1


def total(scores: Tensor, targets: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        Journal.write(targets[:, 1].tolist())
    return torch.nn.functional.cross_entropy(scores, targets[:, 0], reduction="sum")


def numbered() -> Task:
    task = digits.task()
    return dataclasses.replace(
        task,
        train=Numbered(task.train),
        evaluate=None,
        loss=evener.loss(total=total, count=lambda targets: len(targets)),
        metrics={},
        batch_size=128,
    )


def main(directory: str, restarts: str) -> None:
    trained = evener.fit(
        numbered,
        processes=PROCESSES,
        device="cpu",
        epochs=EPOCHS,
        run_dir=Path(directory) / "run",
        save_every="4steps",
        timeout_seconds=60.0,
        rendezvous=Rendezvous(max_restarts=int(restarts)),
        observers=[Journal(Path(directory))],
        show=False,
    )
    (Path(directory) / "digest").write_text(trained.summary.weights_digest)


if __name__ == "__main__":
    main(*sys.argv[1:])
