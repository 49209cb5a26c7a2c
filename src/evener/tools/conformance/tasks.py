"""Small tasks to test strategies with. Each has one feature that a division of the work can get wrong.

All but ``tokens`` and ``sparse`` begin with a linear layer over the features, so that strategies which divide that
layer can be tested too. The number of samples, the batch size and the layer widths have no common divisor.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from evener.core.losses import SumLoss, accuracy
from evener.core.task.average import ema
from evener.core.task.task import Task
from evener.nn.dropout import Dropout

SAMPLES, FEATURES, CLASSES, WORDS = 47, 6, 3, 11


def plain() -> Task:
    """Task with batches of 13 samples; the last has 8."""
    return _task()


def tiny() -> Task:
    """Task with a batch of two samples."""
    return _task(train=_data(2), batch_size=64)


def batch_norm() -> Task:
    """Task with BatchNorm and batches of 9. No bias before BatchNorm: its gradient would be rounding alone."""
    return _task(train=_data(45), **_NORMALIZED)


def averaged() -> Task:
    """Task with BatchNorm and an average of the weights that begins after the second step."""
    return replace(batch_norm(), average=ema(0.7, start=2))


def batch_norm_of_few() -> Task:
    """Task with BatchNorm and batches of 9, of which the last has 2 samples."""
    return _task(**_NORMALIZED)


def tokens() -> Task:
    """Task with sequences of 0 to 6 tokens, padded: a mean over tokens is not a mean over samples."""
    return _task(model=Tokens, train=_padded(), evaluate=_padded(), metrics={})


def tied() -> Task:
    """Task with one weight under two names."""
    return _task(model=Tied)


def unused() -> Task:
    """Task with unused parameters: weight decay moves a weight whose gradient is zero, but not one without a
    gradient.
    """
    return _task(model=Branches, batch_size=5)


def penalty() -> Task:
    """Task with a penalty that is not a sum over elements, and a scheduler that counts steps."""
    return _task(
        penalty=lambda model: 0.1 * sum((p.norm() for p in model.parameters()), start=torch.zeros(())),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
        scheduler_interval="step",
    )


def dropout() -> Task:
    """Task with dropout whose masks depend on the sample."""
    return _task(
        model=lambda: nn.Sequential(nn.Linear(FEATURES, 16), Dropout(0.4), nn.Tanh(), nn.Linear(16, CLASSES))
    )


def several() -> Task:
    """Task with named inputs, of which one is a list and one is None, and with two outputs and two targets."""
    loss = SumLoss(
        count=lambda targets: len(targets["sum"]),
        total=lambda outputs, targets: (
            (outputs[0] - targets["sum"]).square().sum() + (outputs[1] - targets["square"]).abs().sum()
        ),
    )
    return _task(model=Several, train=SeveralData(), evaluate=SeveralData(), loss=loss, metrics={})


def sparse() -> Task:
    """Task with an embedding whose gradient is sparse."""
    return _task(
        model=lambda: Tokens(sparse=True),
        train=_padded(),
        evaluate=_padded(),
        metrics={},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def buffers() -> Task:
    """Task with a buffer that every forward pass in training mode writes."""
    return _task(model=Averaging)


def matrices() -> Task:
    """Task whose optimizer, Muon, looks at whole matrices, and has nothing else. One of them has a single row."""
    return _task(
        model=lambda: nn.Sequential(
            nn.Linear(FEATURES, 8, bias=False),
            nn.Tanh(),
            nn.Linear(8, 1, bias=False),
            nn.Linear(1, 7, bias=False),
            nn.Linear(7, CLASSES, bias=False),
        ),
        optimizer=lambda parameters: torch.optim.Muon(parameters, lr=0.05),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
        scheduler_interval="step",
    )


def broken(what: str, rank: int) -> Task:
    """Task whose ``loss`` or ``gradient`` is NaN on one rank in the fourth step."""
    return _task(model=lambda: Broken(what, rank))


def _task(**parts: Any) -> Task:
    data = _data(SAMPLES)
    usual: dict[str, Any] = {
        "model": _layers,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
        "train": data,
        "evaluate": data,
        "metrics": {"accuracy": accuracy},
        "batch_size": 13,
        "epochs": 4,
    }
    return Task(**(usual | parts))


def _data(samples: int) -> TensorDataset:
    return TensorDataset(_draws(samples, FEATURES), _classes(samples, CLASSES))


def _normalized() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Linear(8, 5, bias=False),
        nn.BatchNorm1d(5, affine=False),
        nn.Linear(5, CLASSES),
    )


_NORMALIZED: dict[str, Any] = {
    "model": _normalized,
    "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "batch_size": 9,
}


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def _draws(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _classes(n: int, classes: int) -> Tensor:
    return torch.randint(classes, (n,), generator=torch.Generator().manual_seed(2))


def _padded() -> TensorDataset:
    words = _classes(SAMPLES * 7, WORDS).view(SAMPLES, 7)
    targets = words.roll(-1, 1)
    for row in range(SAMPLES):
        targets[row, row % 7 :] = -100
    return TensorDataset(words, targets)


class Tokens(nn.Module):
    """Returns scores (N, V, T) of each token. Output and embedding share a weight, unless gradients are sparse."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8, sparse=sparse)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, WORDS, bias=False)
        if not sparse:
            self.out.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.tanh(self.mix(self.embedding(words))).cumsum(1))
        return scores.transpose(1, 2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.encode, self.decode = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.decode(torch.tanh(self.encode(torch.tanh(self.first(x))))))


class Branches(nn.Module):
    """A hidden unit chooses a layer for each sample. One layer is never chosen, and one parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.branches = nn.ModuleList(nn.Linear(8, CLASSES) for _ in range(3))
        self.never = nn.Linear(8, CLASSES)
        self.frozen = nn.Parameter(torch.ones(CLASSES), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        chosen = (hidden[:, 0] > 0.3).long() + (hidden[:, 0] > -0.3).long()
        rows = [self.branches[int(index)](row) for row, index in zip(hidden, chosen, strict=True)]
        return torch.stack(rows) * self.frozen


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(FEATURES, 4), nn.Linear(2, 4)

    def forward(self, wide: Tensor, pair: list[Tensor], mask: None) -> tuple[Tensor, Tensor]:
        assert mask is None, f"the input that is None came as {mask!r}"
        hidden = torch.tanh(self.left(wide) + self.right(torch.stack(pair, 1)))
        return hidden.sum(1), hidden.square().sum(1)


class SeveralData(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        draws = _draws(FEATURES + 3, seed=index)
        inputs = {"wide": draws[:FEATURES], "pair": [draws[FEATURES], draws[FEATURES + 1]], "mask": None}
        return inputs, {"sum": draws[-1], "square": draws[-1].abs()}


class Averaging(nn.Module):
    """Keeps a running mean of its hidden values, which depends on the samples of the rank."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.training:
            self.average.lerp_(hidden.detach().mean(0), 0.1)
        scores: Tensor = self.last(hidden - self.average)
        return scores


class Broken(nn.Module):
    def __init__(self, what: str, rank: int) -> None:
        super().__init__()
        self.layers, self.passes = _layers(), 0
        self.what = what if dist.is_initialized() and dist.get_rank() == rank else ""

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        self.passes += self.training
        if self.passes != 4 or not self.what:
            return scores
        if self.what == "gradient":
            scores.register_hook(lambda gradient: gradient * math.nan)  # type: ignore[no-untyped-call]
            return scores
        return scores * math.nan
