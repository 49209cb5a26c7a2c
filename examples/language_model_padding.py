"""Sequences of unequal length: the loss is a mean over tokens, wherever the long sequences happen to be.

Ranks hold different numbers of real tokens. An average of the ranks' means would weigh the tokens of a rank with short
sequences more; here each token counts the same, as it does on one device.

    python examples/language_model_padding.py
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import evener

IGNORED = -100
VOCABULARY = 12


class Counting(Dataset[Tensor]):
    """Sequences that count upwards from some number, of 3 to 20 tokens."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        length, start = torch.randint(3, 21, (2,), generator=generator).tolist()
        return torch.arange(start, start + length) % VOCABULARY


def pad(sequences: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Inputs (N, T) and the tokens that follow (N, T), IGNORED where there is none."""
    inputs = pad_sequence([s[:-1] for s in sequences], batch_first=True)
    targets = pad_sequence([s[1:] for s in sequences], batch_first=True, padding_value=IGNORED)
    return inputs, targets


class Recurrent(nn.Module):
    """From tokens (N, T) to scores (N, VOCABULARY, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.recurrent = nn.GRU(16, 32, batch_first=True)
        self.out = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embedding(tokens))
        return self.out(hidden).transpose(1, 2)


def task() -> evener.Task:
    return evener.Task(
        name="counting",
        model=Recurrent,
        loss=nn.CrossEntropyLoss(ignore_index=IGNORED),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        train=Counting(),
        evaluate=Counting(),
        metrics={"accuracy": functools.partial(evener.accuracy, ignore_index=IGNORED)},
        collate=pad,
        batch_size=50,
        epochs=3,
    )


if __name__ == "__main__":
    trained = evener.fit(task, processes=1, micro_batch=25)  # gradient accumulation, still a mean over tokens
    print(f"accuracy of the next token {trained.summary.metrics['accuracy']:.3f}")
