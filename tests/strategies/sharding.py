"""A small model of repeated blocks with all that sharding can get wrong, and tasks around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import evener
from evener.core.task.task import Task
from evener.distributed.mesh import Mesh
from evener.strategies.interfaces import StrategySettings
from evener.strategies.sharded.fsdp import Fsdp

WORDS, WIDTH, LENGTH, SAMPLES, PADDING = 11, 6, 5, 37, -100


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(
            nn.Linear(width, 7), nn.Tanh(), evener.nn.Dropout(0.2), nn.Linear(7, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(self.norm(x))


class Model(nn.Module):
    """Scores (N, V, T) of words; tied ends, a scale without dimensions, a frozen weight, a layer that is not used."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.out = nn.Linear(WIDTH, WORDS)
        self.out.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.never = nn.Linear(WIDTH, 2)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) * self.frozen
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        scores: Tensor = self.out(x.cumsum(1) * self.scale)
        return scores.transpose(1, 2)


def task(model: Any = Model, **parts: Any) -> Task:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    targets = words.roll(-1, 1)
    for row in range(SAMPLES):
        targets[row, 1 + row % LENGTH :] = PADDING
    data = TensorDataset(words, targets)
    usual: dict[str, Any] = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        "train": data,
        "evaluate": data,
        "metrics": {},
        "batch_size": 9,
        "epochs": 3,
        "name": "words",
    }
    return Task(**(usual | parts))


def penalised() -> Task:
    """A norm is no sum over rows; tied weights count once."""
    return task(
        penalty=lambda model: 0.1 * sum((p.norm() for p in model.parameters()), start=torch.zeros(()))
    )


def recomputed() -> Task:
    """Blocks whose activations are computed anew in backward."""
    return task(lambda: Model(recompute=True))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.LSTM(WIDTH, 5, num_layers=2, batch_first=True)
        self.out = nn.Linear(5, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.out(self.layers(self.embed(words))[0])
        return scores.transpose(1, 2)


def recurrent() -> Task:
    return task(Recurrent)


@dataclass(frozen=True)
class EachLayer(Fsdp):
    """Every child with weights of its own is a unit."""

    def parallelize(self, model: nn.Module, mesh: Mesh, settings: StrategySettings) -> nn.Module:
        units = [
            name
            for name, child in model.named_children()
            if any(True for _ in child.parameters()) and not isinstance(child, nn.ModuleList)
        ]
        count = dict.fromkeys(model.parameters(), 0)
        for _, parameter in model.named_parameters(remove_duplicate=False):
            count[parameter] += 1
        own = [n for n in units if all(count[p] == 1 for p in model.get_submodule(n).parameters())]
        return Fsdp(",".join(own), self.reshard, self.offload).parallelize(model, mesh, settings)
