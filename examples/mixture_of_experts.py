"""A language model of which each word uses two of eight feed-forward networks, divided over the ranks.

The strategy is `experts`: each rank holds half of the experts of every layer, and words travel to them and back. What
the experts have learned is the same on any number of ranks; so is which words find no room, and the term that keeps the
experts evenly used.

    python examples/mixture_of_experts.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import evener
from evener.nn import Experts

VOCABULARY, LENGTH = 32, 24

Outputs = tuple[Tensor, Tensor, Tensor]


class Dialects(Dataset[tuple[Tensor, Tensor]]):
    """Sequences in one of four dialects, each with its own rule from a word and the one before to the next."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed
        self._rules = torch.randint(1, VOCABULARY, (4, 2), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self._seed * 10**6 + index)
        step, offset = self._rules[int(torch.randint(4, (), generator=generator))].tolist()
        words = torch.randint(VOCABULARY, (2,), generator=generator).tolist()
        while len(words) <= LENGTH:
            words.append((step * words[-1] + offset + words[-2]) % VOCABULARY)
        text = torch.tensor(words)
        return text[:-1], text[1:]


class Model(nn.Module):
    """Words (N, T) to scores (N, T, VOCABULARY), how unevenly experts are used, and which part found no room."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.experts = Experts(width, 64, experts=8, top=2, capacity=1.5)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, words: Tensor) -> Outputs:
        x, _ = self.recurrent(self.embed(words))
        mixed = self.experts(x)
        return self.head(self.norm(x + mixed.output)), mixed.balance, mixed.dropped


def total(outputs: Outputs, targets: Tensor) -> Tensor:
    scores, balance, _ = outputs
    of_words = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
    return of_words + 0.01 * balance * targets.numel()


def right(outputs: Outputs, targets: Tensor) -> evener.Sum:
    return evener.Sum((outputs[0].argmax(-1) == targets).sum(), targets.numel())


def dropped(outputs: Outputs, targets: Tensor) -> evener.Sum:
    return evener.Sum(outputs[2] * len(targets), len(targets))


def task() -> evener.Task:
    return evener.Task(
        name="dialects",
        model=Model,
        loss=evener.loss(total=total, count=Tensor.numel),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        train=Dialects(1200, seed=1),
        evaluate=Dialects(200, seed=2),
        metrics={"accuracy": right, "dropped": dropped},
        batch_size=40,
        epochs=6,
    )


if __name__ == "__main__":
    metrics = evener.fit(task, processes=2, strategy="experts").summary.metrics
    print(f"accuracy {metrics['accuracy']:.3f}, without room {metrics['dropped']:.3f}")
