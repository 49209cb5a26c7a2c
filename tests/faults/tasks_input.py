"""Tasks whose data cannot be read, and whose exceptions cannot be told."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, get_worker_info

from evener.core.task.task import Task
from tests.faults.tasks import SAMPLES, Acts, begun, task
from tests.tasks import classes, draws


class Files(Dataset[Any]):
    """Samples that lie in files, as data sets of pictures have them; some cannot be read."""

    def __init__(self, bad: tuple[int, ...] = (), size: int = SAMPLES) -> None:
        self.samples = [(f"pictures/{n}.png", n % 3) for n in range(size)]
        self._bad, self._inputs, self._targets = bad, draws(size, 6), classes(size, 3)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self._bad:
            self.fail(index)
        return self._inputs[index], self._targets[index]

    def fail(self, index: int) -> None:
        begun()
        raise OSError(f"cannot identify image {Path(self.samples[index][0]).name}")


class Hungry(Files):
    """A worker that may not have so much memory."""

    def fail(self, index: int) -> None:
        assert get_worker_info() is not None
        begun()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
        torch.zeros(2**28)


def item() -> Task:
    """Sample 5 of the second half of a half."""
    whole = ConcatDataset([Files(), Subset(Files((29,)), range(24, 48))])
    return task(train=whole)


def items() -> Task:
    return task(train=Files((7, 23)))


def too_many() -> Task:
    return task(train=Files(tuple(range(0, SAMPLES, 4))))


def hungry() -> Task:
    return task(train=Hungry((7,)))


def long_text() -> Task:
    def act(x: Tensor) -> None:
        begun()
        raise RuntimeError("x" * 5_000_000)

    return task(Acts(act))


class UnspeakableError(RuntimeError):
    def __str__(self) -> str:
        raise TypeError


def no_text() -> Task:
    def act(x: Tensor) -> None:
        begun()
        raise UnspeakableError

    return task(Acts(act))


class ForeignError(BaseException):
    """Not an ``Exception``."""


def foreign() -> Task:
    def act(x: Tensor) -> None:
        begun()
        raise ForeignError("from elsewhere")

    return task(Acts(act))


def talkative() -> Task:
    """Prints in every step, long after anybody reads."""
    return task(Acts(lambda x: print("a step " * 1000, flush=True), call=4), epochs=1)
