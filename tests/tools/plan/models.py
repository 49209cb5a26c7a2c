"""Tasks of plans, and clusters made by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from evener.core.task.task import Task
from evener.tools.plan.cluster import Cluster, Machine, PlannedCard, PlannedLink

GIB = 1 << 30
FAST, SLOW = PlannedLink(1e-6, 100e9), PlannedLink(50e-6, 1e9)


def plan_card(name: str = "card", tflops: float = 100.0, gib: float = 80.0) -> PlannedCard:
    """A card that moves 1 TB/s and has no workspace."""
    flops = {"float32": tflops * 1e12}
    return PlannedCard(name, "cuda", flops, int(gib * GIB), 1e12, 0, None, False)


def plan_cluster(
    machines: int, cards: int, inside: PlannedLink = FAST, between: PlannedLink = SLOW
) -> Cluster:
    machine = Machine("machine", (plan_card(),) * cards, inside, 0)
    return Cluster((machine,) * machines, between)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def classes_task(
    model: Callable[[], nn.Module],
    features: int,
    batch_size: int = 16,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = sgd,
) -> Task:
    count = max(512, batch_size)
    data = TensorDataset(torch.zeros(count, features), torch.zeros(count, dtype=torch.long))
    return Task(
        model=model, train=data, loss=nn.CrossEntropyLoss(), optimizer=optimizer, batch_size=batch_size
    )


def mlp() -> nn.Module:
    """1,732 parameters: 544, 1,056 and 132."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


class Block(nn.Module):
    """Causal attention and a feed-forward block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.inner = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        y = self.norm(x)
        query, key, value = (
            layer(y).view(n, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        found: Tensor = x + self.down(F.relu(self.up(self.inner(x))))
        return found


class Language(nn.Module):
    """From words to scores of the next ones."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList(Block(width, width // 64) for _ in range(layers))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x).transpose(1, 2)
        return scores


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, length: int) -> None:
        self.words = torch.zeros(length, dtype=torch.long)

    def __len__(self) -> int:
        return 512

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return self.words, self.words


def language_task(words: int, width: int, layers: int, length: int, batch_size: int) -> Task:
    return Task(
        model=lambda: Language(words, width, layers),
        train=Sequences(length),
        loss=nn.CrossEntropyLoss(),
        optimizer=adam,
        batch_size=batch_size,
    )
