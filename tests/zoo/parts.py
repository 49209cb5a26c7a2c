"""What the models of the zoo have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from evener.core.task.task import Task


def integers(low: int, high: int, shape: tuple[int, ...], seed: int = 2) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def init_normal(module: nn.Module) -> None:
    """As BERT and GPT-2 are initialised: small weights, zero biases."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Matrices decay; biases and scales do not."""
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.05, momentum=0.9, weight_decay=4e-5)


def task(model: type[nn.Module], train: Dataset[Any], penalty: float, **parts: Any) -> Task:
    """Batches of 11, trained by AdamW; ``penalty`` is the factor of the squares of all weights."""
    usual = {"loss": nn.CrossEntropyLoss(), "optimizer": adamw, "batch_size": 11}
    return Task(model, train=train, penalty=_quadratic(penalty), **(usual | parts))


def _quadratic(factor: float) -> Callable[[nn.Module], Tensor] | None:
    """A penalty of all weights, or none."""
    if not factor:
        return None
    return lambda model: factor * torch.stack([p.square().sum() for p in model.parameters()]).sum()
