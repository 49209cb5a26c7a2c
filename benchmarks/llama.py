"""A model like Llama 3 by its published sizes (arXiv:2407.21783, table 3), as a task on samples of zeros."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from evener.core.task.task import Task


@dataclass(frozen=True)
class LlamaSize:
    """What distinguishes one model of the family from another."""

    width: int
    layers: int
    heads: int
    inner: int
    """Features between the layers of a feed-forward block."""
    kv_heads: int = 8
    """Heads of keys and values, which queries share."""
    words: int = 128_256


SIZES = {
    "3B of alike heads": LlamaSize(3072, 28, 32, 8192, kv_heads=32),
    "8B": LlamaSize(4096, 32, 32, 14_336),
    "70B": LlamaSize(8192, 80, 64, 28_672),
    "405B": LlamaSize(16_384, 126, 128, 53_248),
}


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.heads, self.head = size.heads, size.width // size.heads
        part = self.head * size.kv_heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(size.width, features, bias=False) for features in (size.width, part, part, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        query, key, value = (
            layer(x).view(n, length, -1, self.head).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        angles = torch.arange(length, device=x.device)[:, None] * 5e5 ** -(
            torch.arange(0, self.head, 2, device=x.device) / self.head
        )
        turn = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mixed = F.scaled_dot_product_attention(
            _turned(query, *turn), _turned(key, *turn), value, is_causal=True, enable_gqa=True
        )
        found: Tensor = self.out(mixed.transpose(1, 2).reshape(n, length, -1))
        return found


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(size.width, size.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return found


class Block(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.norm, self.inner_norm = (nn.RMSNorm(size.width, 1e-5) for _ in range(2))
        self.attention, self.feed_forward = Attention(size), FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        found: Tensor = x + self.feed_forward(self.inner_norm(x))
        return found


class Llama(nn.Module):
    """From words to the scores of the next ones. Scores are on dimension 1, where cross entropy wants them."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.words, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.RMSNorm(size.width, 1e-5), nn.Linear(size.width, size.words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(self.norm(x))
        return scores.transpose(1, 2)


class Zeros(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of the same word."""

    def __init__(self, length: int, samples: int = 1 << 20) -> None:
        self._length, self._samples = length, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = torch.zeros(self._length, dtype=torch.long)
        return words, words


def llama_task(size: str, length: int = 8192, loss: Any = None) -> Task:
    """Returns the training of a model with AdamW and cross entropy, or another loss of scores on dimension 1."""
    return Task(
        model=lambda: Llama(SIZES[size]),
        train=Zeros(length),
        loss=loss or nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        batch_size=8,
        name=f"Llama 3 {size}",
    )
