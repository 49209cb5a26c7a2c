"""Models that can be divided by features, heads, channels and words, with widths that two and three ranks cannot divide
into equal parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from evener.core.task.task import Task
from evener.nn import VocabularyParallelCrossEntropy

SAMPLES, PADDING = 29, -100
WORDS, WIDTH, LENGTH = 13, 10, 6


def draws(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def task_of(model: Any, inputs: Tensor, **parts: Any) -> Task:
    data = TensorDataset(inputs, torch.arange(len(inputs)) % 3)
    usual: dict[str, Any] = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda p: torch.optim.AdamW(p, lr=0.02),
        "train": data,
        "evaluate": data,
        "metrics": {"accuracy": evener.accuracy},
        "batch_size": 8,
        "epochs": 9,
    }
    return Task(**(usual | parts))


def mlp() -> Task:
    """BatchNorm and dropout between layers in a row, in a sequence within another."""
    layers = lambda: nn.Sequential(  # noqa: E731
        nn.Sequential(nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7)),
        nn.GELU(),
        evener.nn.Dropout(0.3),
        nn.Linear(7, 6),
        nn.LayerNorm(6),
        nn.Linear(6, 4),
        nn.Tanh(),
        nn.Linear(4, 3),
    )
    return task_of(layers, draws(SAMPLES, 5))


class Feed(nn.Module):
    """As in the language models of today."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.drop, self.down = evener.nn.Dropout(0.2), nn.Linear(hidden, width)

    def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
        made: Tensor = self.down(self.drop(F.silu(self.gate(x)) * self.up(x)))
        return made if scale is None else made * scale


class Twice(nn.Module):
    """A block that is called twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.feed, self.head = nn.Linear(5, 6), Feed(6, 7), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)).softmax(1)
        scores: Tensor = self.head(self.feed(self.feed(hidden) + hidden))
        return scores


def gated() -> Task:
    return task_of(Twice, draws(SAMPLES, 5))


def convolutions() -> Task:
    """Channels normalized, pooled and dropped between."""
    layers = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(2, 5, 3, padding=1, bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        evener.nn.Dropout2d(0.3),
        nn.MaxPool2d(2),
        nn.Conv2d(5, 4, 3, padding="same"),
        nn.Flatten(),
        nn.Linear(36, 3),
    )
    return task_of(layers, draws(SAMPLES, 2, 6, 6))


class Words(nn.Module):
    """PyTorch's own layers, with padding and an output layer that has the embedding's weight."""

    def __init__(self, bias: bool = False, heads: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.place = nn.Embedding(8, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, heads, 7, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(
            WIDTH, heads, 9, dropout=0.0, activation="gelu", batch_first=True
        )
        self.attention = nn.MultiheadAttention(
            WIDTH, heads, add_bias_kv=True, add_zero_attn=True, kdim=WIDTH, vdim=WIDTH
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        padding = words == 0
        causal = nn.Transformer.generate_square_subsequent_mask(words.shape[1], dtype=self.place.weight.dtype)
        x = self.embed(words) + self.place.weight[: words.shape[1]]
        x = self.encoder(x, causal, _added(padding, x))
        x = self.decoder(x, x, causal, tgt_key_padding_mask=_added(padding, x))
        rows = x.transpose(0, 1)
        seen, weights = self.attention(rows, rows.flip(0), rows.flip(0), attn_mask=causal)
        x = x + seen.transpose(0, 1) * weights.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
        scores: Tensor = self.head(x)
        return scores.transpose(1, 2)


def _added(padding: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(padding, dtype=like.dtype).masked_fill(padding, -1e4)


def pad(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """To one length for all batches: one layer attends to what is padded, so that it matters how much there is."""
    inputs, targets = zip(*items, strict=True)
    return _padded(inputs, 0), _padded(targets, PADDING)


def _padded(texts: Sequence[Tensor], value: int) -> Tensor:
    return torch.stack([F.pad(text, (0, LENGTH - len(text)), value=value) for text in texts])


def words(**parts: Any) -> Task:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(1, WORDS, (3 + n % 5,), generator=generator) for n in range(SAMPLES)]
    data = [(text[:-1], text[1:]) for text in texts]
    made: dict[str, Any] = {"train": data, "evaluate": data[:11], "collate": pad, "metrics": {}}
    # The bias of the keys has no gradient but rounding, which Adam would make steps of.
    made |= {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), **parts}
    return task_of(made.pop("model", Words), torch.zeros(1), **made)


def scores_apart() -> Task:
    """A loss that does without the scores of other ranks."""
    return words(model=lambda: Words(bias=True), loss=VocabularyParallelCrossEntropy(label_smoothing=0.1))


def scores_whole() -> Task:
    return words(model=lambda: Words(bias=True), loss=nn.CrossEntropyLoss(label_smoothing=0.1))


def penalised() -> Task:
    """Norms of whole weights, one of which has two names."""
    return words(
        penalty=lambda model: 0.1 * sum((p.norm() for p in model.parameters()), start=torch.zeros(()))
    )


class Heads(nn.Module):
    """Attention as libraries write it: heads are counted by their width, and keys and values have fewer."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.width, self.fused = 2, fused
        if fused:
            self.qkv = nn.Linear(6, 3 * 6)
        else:
            self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.drop, self.o = nn.Dropout(0.0), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        made = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (y.view(*x.shape[:2], -1, self.width).transpose(1, 2) for y in made)
        seen = self.drop((q @ k.transpose(-2, -1)).softmax(-1)) @ v
        output: Tensor = self.o(seen.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.first, self.attention, self.head = nn.Linear(5, 6), Heads(fused), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        scores: Tensor = self.head(hidden + self.attention(hidden)).mean(1)
        return scores


def separate() -> Task:
    return heads(False)


def fused() -> Task:
    return heads(True)


def heads(fused: bool) -> Task:
    optimizer = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    return task_of(lambda: Block(fused), draws(SAMPLES, 4, 5), optimizer=optimizer)
