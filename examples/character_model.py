"""A transformer that continues Python source, a character at a time; its layers are divided over the ranks.

The strategy is `tensor`: each rank has some of the heads and some of the hidden features of every layer, and all ranks
see every sample. What is divided how is found in the model and printed before the first step. Where single layers are
too large for one device, there is no other way; here it shows that nothing of the model has to be written for it.

    python examples/character_model.py
"""

from __future__ import annotations

import inspect
import textwrap

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import evener

TEXT = inspect.getsource(textwrap)
LETTERS = sorted(set(TEXT))
LENGTH = 32


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of the text, and the characters that follow each of theirs."""

    def __init__(self) -> None:
        numbers = {letter: number for number, letter in enumerate(LETTERS)}
        self._text = torch.tensor([numbers[letter] for letter in TEXT])

    def __len__(self) -> int:
        return (len(self._text) - LENGTH - 1) // 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self._text[16 * index : 16 * index + LENGTH + 1]
        return piece[:-1], piece[1:]


class Model(nn.Module):
    """From characters (N, T) to scores (N, letters, T) of the next ones. Layers are PyTorch's own."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), width)
        self.place = nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, len(LETTERS))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, characters: Tensor) -> Tensor:
        x = self.layers(self.embed(characters) + self.place, mask=self.mask, is_causal=True)
        scores: Tensor = self.out(x)
        return scores.transpose(1, 2)


def task() -> evener.Task:
    return evener.Task(
        name="source",
        model=Model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        train=Windows(),
        batch_size=32,
        epochs=5,
    )


if __name__ == "__main__":
    summary = evener.fit(task, processes=2, strategy="tensor").summary
    print(f"{summary.strategy}: loss {summary.final_loss:.2f} a character, {len(LETTERS)} of them")
