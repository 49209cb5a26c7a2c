"""A recurrent language model whose state is owned by unequal parts: rank 0 has twice the memory of rank 1.

The strategy is `sharded`: of weights, gradients and what the optimizer remembers each rank owns rows, here two thirds
and one third, while each computes as many samples as its speed allows. Sequences are of unequal length, and the loss is
a mean over words. The embedding is tied to the output.

    python examples/word_model.py
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import evener
from evener.strategies import Sharded

WHO = ["the farmer", "a tall horse", "the old mare", "my neighbor", "a tired carter"]
DOES = ["pulls", "carries", "draws", "leads", "follows"]
WHAT = ["the heavy load", "a cart of hay", "two barrels", "the plough", "a sledge of wood"]
HOW = ["slowly up the hill", "through the mud", "before the rain", "with a strong mate", "until the evening"]
WORDS = [
    "<pad>",
    "<end>",
    *sorted({word for part in (WHO, DOES, WHAT, HOW) for word in " ".join(part).split()}),
]


class Sentences(Dataset[Tensor]):
    """As numbers of words, with and without how it is done."""

    def __len__(self) -> int:
        return 900

    def __getitem__(self, index: int) -> Tensor:
        draw = torch.randint(5, (5,), generator=torch.Generator().manual_seed(index)).tolist()
        words = [WHO[draw[0]], DOES[draw[1]], WHAT[draw[2]], *([HOW[draw[3]]] if draw[4] else [])]
        return torch.tensor([WORDS.index(word) for word in " ".join(words).split()] + [1])


def pad(sentences: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Words (N, T) and those that follow, 0 where there is none."""
    padded = pad_sequence(sentences, batch_first=True)
    return padded[:, :-1], padded[:, 1:]


class Model(nn.Module):
    """From words (N, T) to scores (N, words, T)."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(WORDS), width)
        self.recurrent = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, len(WORDS))
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embed(words))
        scores: Tensor = self.out(hidden)
        return scores.transpose(1, 2)


def task() -> evener.Task:
    return evener.Task(
        name="sentences",
        model=Model,
        loss=nn.CrossEntropyLoss(ignore_index=0),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-3),
        train=Sentences(),
        evaluate=torch.utils.data.Subset(Sentences(), range(100)),
        metrics={"accuracy": functools.partial(evener.accuracy, ignore_index=0)},
        collate=pad,
        batch_size=60,
        epochs=4,
    )


if __name__ == "__main__":
    strategy = Sharded(zero=2, shard_sizes="2,1")
    summary = evener.fit(task, processes=2, strategy=strategy, balance="auto").summary
    print(f"{summary.strategy}: accuracy of the next word {summary.metrics['accuracy']:.2f}")
