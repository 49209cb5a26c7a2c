"""What the loops beside it have in common: data, a model, and its optimizer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def rows(count: int = 26, seed: int = 1) -> TensorDataset:
    drawn = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count, 4, generator=drawn, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(3, (count,), generator=drawn))


def loader(count: int = 26, seed: int = 1) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(rows(count, seed), batch_size=8, shuffle=True)


def sentences(count: int = 20, longest: int = 7) -> TensorDataset:
    drawn = torch.Generator().manual_seed(2)
    words = torch.randint(5, (count, longest), generator=drawn)
    lengths = torch.randint(1, longest + 1, (count,), generator=drawn)
    targets = torch.where(torch.arange(longest) < lengths[:, None], words.roll(-1, 1), -100)
    return TensorDataset(words, targets)


def classifier() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def speaker() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Embedding(5, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
