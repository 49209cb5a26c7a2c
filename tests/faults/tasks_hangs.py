"""Tasks that hang at a given place, on one rank or on all."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

from evener.core.task.task import Task
from evener.distributed.environment import detect
from evener.distributed.watchdog.watchdog import current_watchdog
from tests.faults import tasks
from tests.faults.tasks import SAMPLES, Acts, begun
from tests.tasks import classes, draws

TIMEOUT_SECONDS = 3.0
"""For the hang, and not for the start on a busy machine."""


def limit(_: Tensor) -> None:
    watchdog = current_watchdog()
    assert watchdog is not None
    watchdog.timeout_seconds = TIMEOUT_SECONDS


def task(*acts: nn.Module, **parts: Any) -> Task:
    return tasks.task(Acts(limit, call=1, rank=None), *acts, **parts)


def spin(*_: object) -> None:
    """Endless, in Python."""
    begun()
    while True:
        pass


def drowse(*_: object) -> None:
    """Endless, in Python, and leaves the processor to others: ``spin`` shows that it need not."""
    begun()
    while True:
        time.sleep(0.01)


def hold(*_: object) -> None:
    """Endless, in one call that never gives up Python's lock."""
    time.sleep(1.5)  # for a heartbeat that tells the limit
    begun()
    sum(range(10**13))


def forward() -> Task:
    return task(Acts(spin))


def forward_all() -> Task:
    return task(Acts(spin, rank=None))


def locked() -> Task:
    return task(Acts(hold))


def locked_all() -> Task:
    return task(Acts(hold, rank=None))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        drowse()
        return gradients[0]


def backward() -> Task:
    return task(Acts(_Backward.apply))


class Data(Dataset[Any]):
    """Does ``act`` before its ``number``-th sample is read by ``rank`` (None: by each), in a worker or not.

    In the second epoch, for what a worker reads ahead in the first would be before the first step.
    """

    def __init__(self, act: Callable[[], None], rank: int | None = 1, number: int = 40) -> None:
        self._inputs, self._targets = draws(SAMPLES, 6), classes(SAMPLES, 3)
        self._act, self._rank, self._left = act, rank, number

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._left -= 1
        if self._left == 0 and self._rank in (None, detect().rank):
            self._act()
        return self._inputs[index], self._targets[index]


def loader() -> Task:
    return task(train=Data(drowse))


def loader_all() -> Task:
    return task(train=Data(drowse, rank=None))


def die() -> None:
    assert get_worker_info() is not None
    begun()
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    begun()
    os.kill(os.getpid(), signal.SIGSTOP)


def worker_killed() -> Task:
    return task(train=Data(die))


def worker_stopped() -> Task:
    return task(train=Data(stop))


class Evaluated(nn.Module):
    """Endless in evaluation on rank 1."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and detect().rank == 1:
            drowse()
        return x


def evaluation() -> Task:
    return task(Evaluated(), epochs=1)


def collective() -> Task:
    def act(x: Tensor) -> None:
        begun()
        dist.all_reduce(torch.zeros(3))

    return task(Acts(act))


def stopped() -> Task:
    return task(Acts(lambda x: stop()))


def leaves() -> Task:
    def act(x: Tensor) -> None:
        begun()
        sys.exit(0)

    return task(Acts(act))


def vanishes() -> Task:
    def act(x: Tensor) -> None:
        begun()
        os._exit(0)

    return task(Acts(act))


def late() -> Task:
    """Rank 1 does not come to the first thing that all do together."""
    if (watchdog := current_watchdog()) is not None:
        watchdog.timeout_seconds = TIMEOUT_SECONDS
    if detect().rank == 1:
        drowse()
    return task()


def goes_on() -> Task:
    """Trains for long, and says when it has begun to."""
    return task(Acts(lambda x: begun(), call=2), epochs=10**6)
