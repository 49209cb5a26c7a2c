"""Models that compute some of the positions between divided layers, with lengths that do not divide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import evener
from evener.core.task.task import Task
from tests.strategies.wide import WORDS, draws, task_of

WIDTH, LENGTH, SAMPLES = 10, 7, 29


class Squared(nn.Module):
    """A norm of the user's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).add(1e-3).rsqrt() * self.scale


class Block(nn.Module):
    """Attention and a feed-forward block, each after a norm and before dropout, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), Squared(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 5, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)
        self.drop, self.mix = evener.nn.Dropout(0.2), Mixing()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=bias, need_weights=False)[0]
        x = x + self.drop(self.down(torch.relu(self.up(self.norm2(x)))))
        mixed: Tensor = x + self.last(self.mix(x))
        return mixed


class Mixing(nn.Module):
    """Looks along the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(draws(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) * self.weight * 0.1


class Own(nn.Module):
    """Blocks of the user's own, each a stream, and one called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop, self.blocks = evener.nn.Dropout(0.1), nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        length = words.shape[1]
        bias = torch.linspace(-1, 1, length * length).view(length, length).to(self.head.weight.dtype)
        x = self.drop(self.embed(words) + self.place(torch.arange(length)))
        for block in (*self.blocks, self.blocks[0]):
            x = block(x, bias=bias)
        scores: Tensor = self.head(self.norm(x))
        return scores.transpose(1, 2)


OWN = "auto,blocks.?=sequence,blocks.*.norm2=sequence,blocks.*.mix=whole,blocks.*.drop=sequence,norm=sequence"


class Encoder(nn.Module):
    """PyTorch's layers, of which positions come first or second."""

    def __init__(
        self, norm_first: bool, batch_first: bool, dropout: float = 0.0, masked: bool = True
    ) -> None:
        super().__init__()
        self.masked = masked  # by a mask which PyTorch looks into
        self.embed, self.batch_first = nn.Embedding(WORDS, WIDTH, padding_idx=0), batch_first
        options: dict[str, Any] = {"dropout": dropout, "batch_first": batch_first, "norm_first": norm_first}
        layer = nn.TransformerEncoderLayer(WIDTH, 5, 13, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 5, 7, **options)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words if self.batch_first else words.t())
        causal = nn.Transformer.generate_square_subsequent_mask(
            words.shape[1], device=x.device, dtype=x.dtype
        )
        padding = torch.zeros_like(words, dtype=x.dtype).masked_fill(words == 0, -1e4)
        causal = causal if self.masked else None
        memory = self.encoder(x, causal, padding)
        x = self.decoder(x, memory[1:] if not self.batch_first else memory[:, 1:], causal)
        scores: Tensor = self.head(x if self.batch_first else x.transpose(0, 1))
        return scores.transpose(1, 2)


def row() -> nn.Sequential:
    """Layers in a row, of which all but the ends are a stream."""
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 13),
        nn.GELU(),
        evener.nn.Dropout(0.2),
        nn.Linear(13, WIDTH),
        evener.nn.Dropout(0.3),
        nn.ReLU(),
        nn.Sequential(nn.Linear(WIDTH, 11), nn.Tanh(), nn.Linear(11, WIDTH)),
        nn.RMSNorm(WIDTH),
        Ends(),
    )


class Slope(nn.Module):
    """A stream of which the model uses the gradient too, in evaluation as in training."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, *layers, self.ends = row()
        self.layers = nn.Sequential(*layers)

    def forward(self, words: Tensor) -> Tensor:
        with torch.enable_grad():
            x = self.embed(words) if self.embed.weight.requires_grad else self.embed(words).requires_grad_()
            y = self.layers(x)
            (slope,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        scores: Tensor = self.ends(y + slope)
        return scores


class Ends(nn.Linear):
    """Scores with the words on dimension 1."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2)


def words(model: Any, length: int = LENGTH, **parts: Any) -> Task:
    texts = torch.randint(1, WORDS, (SAMPLES, length + 1), generator=torch.Generator().manual_seed(1))
    texts[::3, -2:] = 0
    # The bias of the keys has no gradient but rounding, which Adam would make steps of.
    optimizer = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    data = TensorDataset(texts[:, :-1], texts[:, 1:])
    usual = {"train": data, "evaluate": data, "metrics": {}, "optimizer": optimizer}
    return task_of(model, torch.zeros(1), **(usual | parts))


def pre_norm() -> Task:
    return words(lambda: Encoder(norm_first=True, batch_first=True))


def post_norm() -> Task:
    return words(lambda: Encoder(norm_first=False, batch_first=False))


def in_a_row() -> Task:
    return words(row)


def slope() -> Task:
    return words(Slope)


def own_blocks() -> Task:
    return words(Own)


def short() -> Task:
    """Fewer positions than ranks."""
    return words(lambda: Encoder(norm_first=True, batch_first=True), length=2)


def one_position() -> Task:
    return words(row, length=1)


# What is wrong in a stream


class Odd(nn.Module):
    """A divided pair beside what the function does."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), Ends()
        self.inner = Inner(function)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.inner(self.embed(words)))
        return scores


class Inner(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), nn.LayerNorm(WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        nn.init.zeros_(self.place.weight)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        made: Tensor = y + self.down(torch.relu(self.up(y))) + self.function(self, y)
        return made


def averages() -> Task:
    return words(lambda: Odd(lambda m, x: x.mean(1, keepdim=True)))


def averages_in_training() -> Task:
    return words(lambda: Odd(lambda m, x: x.mean(1, keepdim=True) if m.training else x))


def counts() -> Task:
    """Hidden at first by a weight of zeros, were it not varied."""
    return words(lambda: Odd(lambda m, x: x * m.place(torch.arange(x.shape[1])).sum(-1, keepdim=True)))


def adds_all() -> Task:
    return words(lambda: Odd(lambda m, x: m.place.weight))


def norms_all() -> Task:
    """A norm of a tensor that has other positions."""
    return words(
        lambda: Odd(lambda m, x: m.norm(m.place.weight[:3].expand(len(x), 3, WIDTH)).mean(1, keepdim=True))
    )


def drops() -> Task:
    """By a function, in training."""
    return words(lambda: Odd(lambda m, x: nn.functional.dropout(x, 0.3, m.training)))


def flat() -> Task:
    return task_of(Flat, draws(SAMPLES, 5))


class Flat(nn.Sequential):
    """Without positions."""

    def __init__(self) -> None:
        norms = nn.LayerNorm(5), nn.LayerNorm(5)
        layers = norms[0], nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5), norms[1], nn.Linear(5, 3)
        super().__init__(*layers)


class Repeated(nn.Module):
    """A part of a stream that backward computes again, or all of it."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.embed, self.head, self.whole = nn.Embedding(WORDS, WIDTH), Ends(), whole
        self.feed = Feed(not whole)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        x = checkpoint(self.feed, x, use_reentrant=False) if self.whole else self.feed(x)
        scores: Tensor = self.head(x)
        return scores


class Feed(nn.Module):
    def __init__(self, repeat: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)
        self.drop, self.repeat = evener.nn.Dropout(0.2), repeat

    def forward(self, x: Tensor) -> Tensor:
        norm = (lambda x: checkpoint(self.norm, x, use_reentrant=False)) if self.repeat else self.norm
        made: Tensor = x + self.drop(self.down(torch.relu(self.up(norm(x)))))
        return made


def repeats() -> Task:
    return words(lambda: Repeated(whole=True))


def repeats_inside() -> Task:
    return words(lambda: Repeated(whole=False))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.feed, self.norm = nn.Embedding(WORDS, WIDTH), Feed(False), nn.LayerNorm(WIDTH)
        self.norm.weight, self.head = self.feed.norm.weight, Ends()

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.feed(self.embed(words))))
        return scores


def tied() -> Task:
    return words(Tied)
