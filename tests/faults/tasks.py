"""Tasks in which something goes wrong at a given place; they say when it does by writing a file."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from evener.core.task.task import Task
from evener.distributed.environment import detect
from tests.breaking import brittle, data
from tests.tasks import classes, draws

SAMPLES = 48


def begun() -> None:
    """The fault begins now."""
    Path(os.environ["EVENER__TESTS_FAULT"]).write_text("begun")


class Acts(nn.Module):
    """Hands its input on, and in the ``call``-th pass of ``rank`` (None: of each) in training does ``act`` first."""

    def __init__(self, act: Callable[[Tensor], Tensor | None], call: int = 4, rank: int | None = 1) -> None:
        super().__init__()
        self._act, self._call, self._rank, self._calls = act, call, rank, 0

    def forward(self, x: Tensor) -> Tensor:
        self._calls += self.training
        if self.training and self._calls == self._call and self._rank in (None, detect().rank):
            changed = self._act(x)
            return x if changed is None else changed
        return x


def task(*acts: nn.Module, **parts: Any) -> Task:
    """A perceptron whose first layer's features pass through ``acts``."""
    data = TensorDataset(draws(SAMPLES, 6), classes(SAMPLES, 3))
    usual: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(6, 8), *acts, nn.Tanh(), nn.Linear(8, 3)),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        "train": data,
        "evaluate": data,
        "metrics": {"accuracy": evener.accuracy},
        "batch_size": 12,
        "epochs": 4,
    }
    return Task(**(usual | parts))


def killed() -> Task:
    def act(x: Tensor) -> None:
        begun()
        os.kill(os.getpid(), signal.SIGKILL)

    return task(Acts(act))


def raises() -> Task:
    def act(x: Tensor) -> None:
        begun()
        raise RuntimeError("no luck")

    return task(Acts(act))


class Slow(nn.Module):
    """A step takes long enough for a signal to find it."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x


def runs() -> Task:
    """Nothing is wrong with it; it says when it has begun to train."""

    def act(x: Tensor) -> None:
        begun()

    return task(Slow(), Acts(act, rank=0), epochs=1000)


def runs_for_a_while() -> Task:
    """A second or more after it has begun to, which is after a checkpoint: the ranks have met for that."""
    return task(Slow(), Acts(lambda x: begun(), call=10, rank=0), epochs=15)


def slow_disk() -> Task:
    """As ``runs``; each file that rank 0 writes for a checkpoint takes its time."""
    synced = os.fsync

    def slowly(file: int) -> None:
        begun()
        time.sleep(0.5)
        synced(file)

    if detect().rank == 0:
        os.fsync = slowly
    return task(Slow(), epochs=1000)


def joins_late() -> Task:
    """Rank 1 keeps the others waiting, for less than the timeout."""
    if detect().rank == 1:
        begun()
        time.sleep(3)
    return task()


def stuck_in_native_code() -> Task:
    """Rank 1 holds the interpreter, so that no signal's handler runs there."""

    def act(x: Tensor) -> None:
        begun()
        sum(range(10**13))  # in C, which looks at no signal

    return task(Acts(act))


def killed_once() -> Task:
    """Rank 1 is killed in the fourth step of its first start."""

    def act(x: Tensor) -> None:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            begun()
            os.kill(os.getpid(), signal.SIGKILL)

    return task(Acts(act))


def killed_twice() -> Task:
    """Rank 1 is killed in the fourth step of its first start, and of its second."""

    def act(x: Tensor) -> None:
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) < 2:
            begun()
            os.kill(os.getpid(), signal.SIGKILL)

    return task(Acts(act))


def raises_once() -> Task:
    """Rank 1 raises in the fourth step of its first start, and the others lose it."""

    def act(x: Tensor) -> None:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            begun()
            raise RuntimeError("no luck")

    return task(Acts(act))


def undisturbed() -> Task:
    """As those above, without a fault."""
    return task(Acts(lambda x: None))


def digest(built: Callable[[], Task], **settings: Any) -> str:
    """Of the weights that the task trains, on a rank that is up already."""
    return evener.fit(built, device="cpu", show=False, **settings).summary.weights_digest


# Numbers


def bad_sample() -> Task:
    """Of one epoch in two, a sample whose gradient is not finite."""
    begun()
    return brittle({13: 100.0}, evaluate=data())


def bad_loss_at_the_end() -> Task:
    """The last step of the run, of which there is one."""
    begun()
    return brittle(dict.fromkeys(range(40), 200.0), batch_size=40, epochs=1)


def overflows() -> Task:
    """In the last step of the second epoch, on one rank: finite numbers, whose products are not."""

    def act(x: Tensor) -> Tensor:
        begun()
        return x.detach() + (x - x.detach()) * 1e30 * 1e30

    return task(Acts(act, call=8, rank=0), epochs=2)


class Astray(torch.optim.SGD):
    """Changes a weight of one rank behind everybody's back."""

    calls = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.calls += 1
        if self.calls == 5 and detect().rank == 1:
            begun()
            self.param_groups[0]["params"][0].data[0, 0] += 1


def edited() -> Task:
    return task(optimizer=lambda parameters: Astray(parameters, lr=0.05, momentum=0.9))


def passing() -> Task:
    """A number that is none, once: as of memory that failed for a moment."""

    def act(x: Tensor) -> Tensor:
        begun()
        return x * float("nan")

    return task(Acts(act, call=7))


def one_parameter_more() -> Task:
    begun()

    def model() -> nn.Module:
        built = nn.Sequential(nn.Linear(6, 3))
        if detect().rank == 1:
            built.register_parameter("more", nn.Parameter(torch.zeros(2)))
        return built

    return task(model=model)


def another_order() -> Task:
    begun()

    def model() -> nn.Module:
        built = nn.Linear(6, 3)
        if detect().rank == 1:
            bias = built.bias
            del built.bias
            weight = built.weight
            del built.weight
            built.bias, built.weight = bias, weight
        return built

    return task(model=model)


def other_rows() -> Task:
    begun()
    rows = SAMPLES - 2 * (detect().rank == 1)
    return task(train=TensorDataset(draws(rows, 6), classes(rows, 3)))


def other_rate() -> Task:
    begun()
    return task(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1 + detect().rank))
