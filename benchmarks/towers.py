"""Models of repeated blocks, in a module that ranks import: torch.compile by itself finds no globals of a script."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """Of a perceptron over tokens: enough products to gain by, and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + y


def tower() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), *(Block(256) for _ in range(4)), nn.Linear(256, 10))
