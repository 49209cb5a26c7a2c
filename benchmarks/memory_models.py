"""Models of every kind, as tasks, with weights and activations of some MB: what estimates of memory are compared on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from benchmarks.drawn import rand
from evener.core.task.task import Task

KINDS, WORDS, LENGTH = 10, 2000, 64


class Block(nn.Module):
    """Of a ResNet (He et al. 2015, arXiv:1512.03385)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.again = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norm(self.first(x)))
        return torch.relu(x + self.again(self.second(inner)))


class Attention(nn.Module):
    """Before a position, as in GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.inner_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.mix(self.norm(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.down(F.gelu(self.up(self.inner_norm(x))))


class Checkpointed(nn.Module):
    """A layer whose activations are made anew in backward (Chen et al. 2016, arXiv:1604.06174)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return made


class Words(nn.Module):
    """From words (N, T) to scores (N, WORDS, T), the last layer's weights being those of the first."""

    def __init__(self, layers: Iterable[nn.Module], width: int) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(WORDS, width), nn.Sequential(*layers)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.out(self.norm(self.layers(self.embed(words))))
        return scores.transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, 64), nn.Linear(128, WORDS)
        self.cell = nn.LSTM(64, 128, num_layers=2, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.out(self.cell(self.embed(words))[0])
        return scores.transpose(1, 2)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Around(nn.Module):
    """A U-Net (Ronneberger et al. 2015, arXiv:1505.04597): down, up, and past both."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.begin = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.low = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), Block(2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.end, self.out = nn.Conv2d(2 * width, width, 3, padding=1), nn.Linear(width, KINDS)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.begin(x))
        low = self.up(self.low(torch.relu(self.down(x))))
        scores: Tensor = self.out(torch.relu(self.end(torch.cat([x, low], 1))).mean((2, 3)))
        return scores


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.Tanh(), nn.Linear(512, KINDS)
    )


def _convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, KINDS)),
    )


def _resnet(wrapped: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(wrapped(Block(32)), wrapped(Block(32)), nn.Conv2d(32, 64, 3, stride=2, padding=1)),
        *(wrapped(Block(64)), wrapped(Block(64)), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(64, KINDS),
    )


def _encoder() -> nn.Module:
    layers = (nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, norm_first=True) for _ in range(2))
    return Words(layers, 128)


def _gpt(wrapped: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> nn.Module:
    return Words([wrapped(Attention(128, 4)) for _ in range(4)], 128)


def _embeddings() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(10 * WORDS, 64), Mean(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, KINDS)
    )


def _rows(count: int) -> TensorDataset:
    return TensorDataset(rand(count, 256), torch.arange(count) % KINDS)


def _images(count: int) -> TensorDataset:
    return TensorDataset(rand(count, 3, 32, 32), torch.arange(count) % KINDS)


def _texts(count: int) -> TensorDataset:
    words = torch.randint(WORDS, (count, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(words[:, :-1], words[:, 1:])


def _sets(count: int) -> TensorDataset:
    words = torch.randint(10 * WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return TensorDataset(words, torch.arange(count) % KINDS)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], TensorDataset], int]] = {
    "MLP": (_mlp, _rows, 64),
    "convolutions": (_convolutions, _images, 16),
    "ResNet": (_resnet, _images, 16),
    "ResNet, checkpointed": (partial(_resnet, Checkpointed), _images, 16),
    "U-Net": (Around, _images, 16),
    "encoder, tied": (_encoder, _texts, 8),
    "GPT, tied": (_gpt, _texts, 8),
    "GPT, tied, checkpointed": (partial(_gpt, Checkpointed), _texts, 8),
    "LSTM": (Recurrent, _texts, 8),
    "embeddings": (_embeddings, _sets, 32),
}
"""Model, data and batch size by name."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
}

STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single", "processes": 1},
    "ddp": {"strategy": "ddp", "processes": 2},
    "sharded, zero 2": {"strategy": "sharded", "strategy_option": ("zero=2",), "processes": 2},
    "sharded, zero 3": {"strategy": "sharded", "strategy_option": ("zero=3",), "processes": 2},
    "tensor": {"strategy": "tensor", "processes": 2},
    "pipeline": {"strategy": "pipeline", "strategy_option": ("balance=equal",), "processes": 2},
}
"""Settings by name."""


def task_of(model: str, optimizer: str, times: int = 1) -> Task:
    """The task of these names, with data for so many times its batch size."""
    make, data, batch_size = MODELS[model]
    return Task(
        model=make,
        loss=nn.CrossEntropyLoss(),
        optimizer=OPTIMIZERS[optimizer],
        train=data(4 * batch_size * times),
        batch_size=batch_size,
        epochs=2,
        name=model,
    )
