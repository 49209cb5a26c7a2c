"""Small tasks for runs that are exact in bits; tests name them as ``tests.bits_tasks:NAME``.

Batches of 26 in grains of 3 and blocks of 2 grains: the last block and the last grain of a batch are smaller, and the
last batch of an epoch has 23 samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

import evener
from evener.core.task.task import Task
from tests.tasks import classes, draws

SAMPLES = 101
CUT = {"grain": 3, "block": 2}
WORDS = 20


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _task(model: Any, data: Dataset[Any], **parts: Any) -> Task:
    usual: dict[str, Any] = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": _adamw,
        "train": data,
        "evaluate": data,
        "metrics": {"accuracy": evener.accuracy},
        "batch_size": 26,
        "epochs": 9,
    }
    return Task(**(usual | parts))


class Noisy(nn.Module):
    """Draws from the generators of torch, and skips a layer for some grains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.last = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, 3)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.first(x + 0.1 * torch.rand_like(x))))
        if float(x[0, 0]) > 0.5:
            hidden = hidden + self.rare(hidden)
        scores: Tensor = self.last(hidden)
        return scores


def mlp() -> Task:
    return _task(Noisy, TensorDataset(draws(SAMPLES, 6), classes(SAMPLES, 3)))


def convolution() -> Task:
    """Without BatchNorm; SGD, whose momentum goes on from step to step."""
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 3)
    )
    return _task(model, TensorDataset(draws(SAMPLES, 1, 8, 8), classes(SAMPLES, 3)), optimizer=_sgd)


def batch_norm() -> Task:
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(6, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.BatchNorm1d(16),
        nn.Linear(16, 3),
    )
    return _task(model, TensorDataset(draws(SAMPLES, 6), classes(SAMPLES, 3)), optimizer=_sgd)


class Sentences(Dataset[Any]):
    """Sequences of 1 to 12 words, and the next word of each."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(1, WORDS, (2 + index * 7 % 12,), generator=generator)
        return words[:-1], words[1:]


def padded(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Pads to the longest of the samples, which depends on who meets whom."""
    inputs, targets = zip(*items, strict=True)
    return pad_sequence(list(inputs), batch_first=True), pad_sequence(list(targets), True, -100)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 16, padding_idx=0), nn.Embedding(16, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores: Tensor = self.head(self.block(hidden, mask, x == 0))
        return scores.transpose(1, 2)


def transformer() -> Task:
    return _task(Transformer, Sentences(), collate=padded, metrics={})


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, 16), nn.LSTM(16, 24, 2, batch_first=True)
        self.head = nn.Linear(24, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layer(self.words(x))[0])
        return scores.transpose(1, 2)


def lstm() -> Task:
    return _task(Recurrent, Sentences(), collate=padded, metrics={}, optimizer=_sgd)


class Depends(nn.Linear):
    """Computes something else on another number of ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + evener.world_size() / 1024)


def depends() -> Task:
    return _task(lambda: Depends(6, 3), TensorDataset(draws(SAMPLES, 6), classes(SAMPLES, 3)))
