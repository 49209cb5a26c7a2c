"""Small tasks that each hold one difficulty; tests name them as ``tests.tasks:NAME``."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import evener
from evener.core.task.task import Task
from evener.tools.conformance import tasks as testing_tasks

SAMPLES = 47
Tokens = testing_tasks.Tokens


def draws(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(n: int, number: int, seed: int = 2) -> Tensor:
    return torch.randint(number, (n,), generator=torch.Generator().manual_seed(seed))


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2)


def _task(**parts: Any) -> Task:
    """One of 47 samples of six features, but for what ``parts`` say."""
    data = TensorDataset(draws(SAMPLES, 6), classes(SAMPLES, 3))
    usual: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": _sgd,
        "train": data,
        "evaluate": data,
        "metrics": {"accuracy": evener.accuracy},
        "batch_size": 13,
        "epochs": 2,
    }
    return Task(**(usual | parts))


def plain() -> Task:
    return _task(name="plain")


def costly() -> Task:
    """Samples of 1 to 100 units of cost, in a model that normalizes over a batch."""
    return replace(batch_norm(), name="costly", cost=lambda index: 1 + 99 * (index * 7 % 47 / 46) ** 4)


def batch_norm() -> Task:
    """Batches of 9: the last of an epoch has 2 samples, fewer than three ranks."""
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8, affine=False),
        nn.Linear(8, 3),
    )
    return _task(model=model, batch_size=9)


def tokens() -> Task:
    return replace(testing_tasks.tokens(), epochs=2)


def sparse() -> Task:
    return replace(testing_tasks.sparse(), epochs=2)


class Branches(nn.Module):
    """Each sample chooses a layer; one layer is never chosen, one parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.never = nn.Linear(6, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 1.2).long() + (x[:, 0] > -0.5).long()
        rows = [self.branches[int(index)](row) for row, index in zip(x, chosen, strict=True)]
        return torch.stack(rows) * self.frozen


def branches() -> Task:
    return _task(model=Branches, batch_size=5)


class Rounded(torch.autograd.Function):
    """Rounds to a step, and gives no gradient for the step, as a quantizer may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        return (x / step).round() * step

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class NoGradients(nn.Module):
    """Backward reaches ``step`` without a gradient. It does not reach ``unused``, and ``late`` only where a rank has
    samples whose first feature is large."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.full((6,), 0.1))
        self.layer, self.late, self.unused = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = Rounded.apply(x, self.step)  # type: ignore[no-untyped-call]
        out: Tensor = self.layer(x)
        large = x[:, :1] > 1.2
        return out + self.late(x) * large if large.any() else out


def no_gradients() -> Task:
    return _task(model=NoGradients, batch_size=5)


class LateGaps(nn.Module):
    """From the third pass on, backward reaches ``step`` without a gradient, and skips ``late`` where no sample is
    large. Until then both have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.full((6,), 0.1))
        self.layer, self.late = nn.Linear(6, 3), nn.Linear(6, 3)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        if self.passes < 3:
            return self.late(x * self.step) + self.layer(x)  # type: ignore[no-any-return]
        out: Tensor = self.layer(Rounded.apply(x, self.step))  # type: ignore[no-untyped-call]
        large = x[:, :1] > 1.2
        return out + self.late(x) * large if large.any() else out


def late_gaps() -> Task:
    return _task(model=LateGaps, batch_size=5)


class Hooked(nn.Linear):
    """Clamps the gradient of its weight, which is something else for the parts of ranks."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        self.bias.register_post_accumulate_grad_hook(_signed)  # type: ignore[no-untyped-call]


def _signed(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.sign() * 0.01


def hooked() -> Task:
    return _task(model=Hooked, batch_size=5)


class HookedLater(nn.Linear):
    """Gets a hook when it is called in evaluation, or in training if ``in_training``."""

    def __init__(self, in_training: bool = False) -> None:
        super().__init__(6, 3)
        self.in_training, self.is_hooked = in_training, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked and self.training == self.in_training:
            self.is_hooked = True
            self.weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))  # type: ignore[no-untyped-call]
        return super().forward(x)


def hooked_later(in_training: bool = False) -> Task:
    return _task(model=partial(HookedLater, in_training), batch_size=5)


def penalty() -> Task:
    return _task(
        penalty=lambda model: 0.03 * sum((p.abs().sum() for p in model.parameters()), start=torch.zeros(())),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
        scheduler_interval="step",
    )


def several() -> Task:
    return replace(testing_tasks.several(), epochs=2)


def dropout() -> Task:
    model = lambda: nn.Sequential(nn.Linear(6, 16), evener.nn.Dropout(0.4), nn.Tanh(), nn.Linear(16, 3))  # noqa: E731
    return _task(model=model)


def compiled() -> Task:
    """As ``dropout``, compiled with a backend that needs no C++ compiler, from torch's own dropout."""

    def model() -> Any:
        plain = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.4), nn.Tanh(), nn.Linear(16, 3))
        return torch.compile(evener.nn.exact_dropout(plain), backend="aot_eager")

    return _task(model=model)


def plain_dropout() -> Task:
    return _task(model=lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.4), nn.Linear(16, 3)))


def summed() -> Task:
    return _task(loss=nn.CrossEntropyLoss(reduction="sum"), optimizer=lambda p: torch.optim.SGD(p, lr=0.01))


def tiny() -> Task:
    """Fewer samples than ranks."""
    return _task(train=TensorDataset(draws(2, 6), classes(2, 3)), batch_size=64)


class Counting(nn.Module):
    """Writes a buffer of its own in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(x.detach().mean(0), 0.1)
        scores: Tensor = self.linear(x - self.average)
        return scores


def buffers() -> Task:
    return _task(model=Counting)


def explodes() -> Task:
    return _task(optimizer=lambda p: torch.optim.SGD(p, lr=1e38), name="explodes")


class OneBadTarget(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return draws(6, seed=index), torch.tensor(float("nan") if index == 20 else 1.0)


def one_bad_target() -> Task:
    return _task(
        model=lambda: nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)),
        loss=nn.MSELoss(),
        train=OneBadTarget(),
        evaluate=None,
        metrics={},
    )


def no_pairs() -> Task:
    return _task(train=TensorDataset(draws(SAMPLES, 6)))


def no_count() -> Task:
    return _task(loss=lambda outputs, targets: outputs.sum())


class FailsOnRankOne(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            raise RuntimeError("this layer has no luck")
        return super().forward(x)


def fails_on_rank_one() -> Task:
    return _task(model=lambda: FailsOnRankOne(6, 3))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from zip(draws(SAMPLES, 6), classes(SAMPLES, 3), strict=True)


def stream() -> Task:
    return _task(train=Stream())


class StreamOfParts(Stream):
    def shard(self, index: int, count: int) -> Any:
        return itertools.islice(self, index, None, count)


def stream_of_parts() -> Task:
    return _task(train=StreamOfParts())


class Resumable:
    """A stream with a state, and no ``IterableDataset``: the order of each epoch is its own."""

    def __init__(self, samples: int = 3 * SAMPLES) -> None:
        self.samples, self.epoch, self.at, self.begins_at = samples, 0, 0, 0
        self.inputs, self.targets = draws(samples, 6), classes(samples, 3)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.at, self.begins_at = self.begins_at, 0
        for number in order[self.at :]:
            self.at += 1
            yield self.inputs[number], self.targets[number]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins_at = state["at"]


def resumable() -> Task:
    return _task(train=Resumable())  # type: ignore[arg-type]


SHARDS = (20, 0, 31, 11, 5, 26)


def rows_of(shard: int) -> Any:
    """The samples of a shard, one after the other."""
    yield from zip(draws(SHARDS[shard], 6, seed=shard), classes(SHARDS[shard], 3, seed=shard), strict=True)


def sharded() -> Task:
    data = evener.ShardedDataset(range(len(SHARDS)), rows_of, together=3, window=4)
    return _task(train=data, evaluate=data)


def not_a_task() -> int:
    return 3


class SkipsLater(nn.Module):
    """From its seventh forward pass on, a layer is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.first = nn.Linear(6, 3), nn.Linear(6, 3)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        scores: Tensor = self.always(x)
        return scores + self.first(x) if self.passes <= 6 else scores


def skips_later() -> Task:
    return _task(model=SkipsLater)


class SkipsEverySecond(SkipsLater):
    """With two micro-batches a step: the last of them skips a layer."""

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        scores: Tensor = self.always(x)
        return scores + self.first(x) if self.passes % 2 else scores


def last_micro_batch_skips() -> Task:
    return _task(model=SkipsEverySecond, train=TensorDataset(draws(48, 6), classes(48, 3)), batch_size=12)


class Layouts(nn.Module):
    """Parameters that are not contiguous, and a buffer that is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(draws(24, 3).t())
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.convolution(x.view(-1, 2, 1, 3).expand(-1, 2, 2, 3))).flatten(1)
        return (hidden @ self.transposed.t()) @ self.mask.softmax(1)


def layouts() -> Task:
    return _task(model=Layouts)


class Replacing(Counting):
    """Puts a new tensor in the place of its buffer."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average = self.average * 0.9 + x.detach().mean(0) * 0.1
        scores: Tensor = self.linear(x - self.average)
        return scores


def replaced_buffers() -> Task:
    return _task(model=Replacing)


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def adversaries() -> Task:
    return _task(model=Adversaries, loss=None, metrics={}, evaluate=None)


def mixed() -> Task:
    """BatchNorm and a dropout of torch, and a scheduler that counts epochs."""
    return _task(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )


class Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.03)
        return super().forward(x)


def slow() -> Task:
    """A run of minutes, for those who interrupt it."""
    return _task(model=lambda: Slow(6, 3), epochs=1000, name="slow")
