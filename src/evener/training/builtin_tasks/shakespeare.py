"""A character-level transformer on a text file, such as the plays of Shakespeare."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from evener.core.losses import accuracy
from evener.core.task.task import Task
from evener.data.datasets.text import CharacterText
from evener.errors import TaskError
from evener.nn.dropout import Dropout


def task(
    data_dir: str | Path | None = None,
    context: int = 64,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    dropout: float = 0.0,
) -> Task:
    """Returns the task: predict the next character.

    Args:
        data_dir: The text file, or a directory that holds it as ``input.txt``.
        context: Number of characters that the model sees.
        width: Size of the embedding.
        layers: Number of transformer blocks.
        heads: Attention heads of a block.
        dropout: Probability of dropping an activation.

    Raises:
        TaskError: If no text is named.
    """
    if data_dir is None:
        raise TaskError(
            "task 'shakespeare' reads a text file: name it, or its directory, with --data-dir PATH"
        )
    path = Path(data_dir) / "input.txt" if Path(data_dir).is_dir() else Path(data_dir)
    text = CharacterText(path, context=context, train=True)
    return Task(
        name="shakespeare",
        model=lambda: CharacterTransformer(len(text.vocabulary), context, width, layers, heads, dropout),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        train=text,
        evaluate=CharacterText(path, context=context, train=False),
        metrics={"accuracy": accuracy},
        batch_size=64,
        epochs=1,
    )


class CharacterTransformer(nn.Module):
    """Maps characters (N, T) to scores (N, vocabulary, T) of the character that follows each."""

    def __init__(
        self, vocabulary: int, context: int, width: int, layers: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)  # small, because it also computes the scores
        self.place = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embedding(characters) + self.place[: characters.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.norm(x) @ self.embedding.weight.T  # the embedding is tied to the output
        return scores.transpose(1, 2)


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each around a residual path."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop_attention, self.drop_mlp = Dropout(dropout), Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_attention(self.out(self.attend(self.norm_attention(x))))
        out: Tensor = x + self.drop_mlp(self.mlp(self.norm_mlp(x)))
        return out

    def attend(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined: Tensor = mixed.transpose(1, 2).reshape(n, t, width)
        return joined
