"""Transformers of text: BERT's encoder and GPT's decoder.

The softmax over keys does not change when the same number is added to all scores of a query, so the gradient of a key's
bias is mathematically zero. Biases start at zero, as in BERT and GPT-2, so these are rounding errors to the end.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener.core.task.task import Task
from tests.zoo.parts import init_normal, integers, task

WORDS, LENGTH, WIDTH, HEADS, SAMPLES = 37, 9, 16, 2, 44
IGNORED = -100


class SelfAttention(nn.Module):
    """Separate projections, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (heads(f(x)) for f in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(x.dtype).min)
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm1 = SelfAttention(), nn.LayerNorm(WIDTH, eps=1e-12)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """Masked words: the pooler has no part in the loss, the decoder is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.places, self.types = nn.Embedding(LENGTH + 3, WIDTH), nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(2))
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.transform, self.transform_norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.register_buffer("place_ids", torch.arange(LENGTH)[None], persistent=False)
        self.apply(init_normal)
        self.decoder.weight = self.words.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places(self.place_ids) + self.types(torch.zeros_like(input_ids))
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, attention_mask.bool())
        scores = self.decoder(self.transform_norm(F.gelu(self.transform(x))))
        return scores.transpose(1, 2)


class Masked(torch.utils.data.Dataset[Any]):
    """Sentences of 4 to 9 words, every third of which is to be told."""

    def __init__(self) -> None:
        self._words = integers(1, WORDS, (SAMPLES, LENGTH))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        known = torch.arange(LENGTH) < 4 + index % 6
        words = self._words[index] * known
        told = known & (torch.arange(LENGTH) % 3 == index % 3)
        inputs = {"input_ids": words.masked_fill(told, 3), "attention_mask": known.long()}
        return inputs, words.masked_fill(~told, IGNORED)


def bert(penalty: float = 0.0) -> Task:
    return task(Bert, Masked(), penalty, name="bert")


class CausalAttention(nn.Module):
    """One projection for all three, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.ones(LENGTH, LENGTH).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (heads(part) for part in self.c_attn(x).split(WIDTH, -1))
        scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        scores = scores.masked_fill(~self.bias[: x.shape[1], : x.shape[1]], -torch.inf)
        return self.c_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), CausalAttention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """The next word, with the head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.apply(init_normal)
        self.lm_head.weight = self.wte.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.wte(words) + self.wpe(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x)).transpose(1, 2)


def gpt(penalty: float = 0.0) -> Task:
    words = integers(0, WORDS, (SAMPLES, LENGTH + 1))
    return task(Gpt, TensorDataset(words[:, :-1].clone(), words[:, 1:].clone()), penalty, name="gpt")
