"""Models that are cut into stages, and tasks of them: ties, sizes, skipped blocks, layers that samples choose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import evener
from evener.core.task.task import Task
from tests.tasks import _task

WORDS, WIDTH, SAMPLES, PADDING = 11, 6, 37, -100


class Block(nn.Module):
    """Causal attention with a mask, and a scale that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.drop = nn.Linear(WIDTH, WIDTH), evener.nn.Dropout(0.2, batch_dim=0)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        scores = (query @ key.transpose(-1, -2)).masked_fill(~mask[:, None, :], -1e9).softmax(-1)
        return x + self.scale * self.drop(self.out(scores @ value).transpose(0, 1).transpose(0, 1))


class Language(nn.Module):
    """Dictionaries in and out, tied ends, one more weight of two stages, a value that skips blocks, and a size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.never = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(
        self, words: Tensor, mask: Tensor, labels: Any = None, scale: float = 1.0
    ) -> dict[str, Tensor]:
        assert labels is None
        length = words.size(1)
        x = first = self.gain * self.embed(words) + self.place(torch.arange(length, device=words.device))
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x * self.gain + first) * self.frozen
        return {"scores": self.head(x) * scale, "length": torch.full_like(words[:, 0], length)}


def total(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    scores = outputs["scores"]
    assert int(outputs["length"][0]) == scores.size(1)
    return nn.functional.cross_entropy(
        scores.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum"
    )


def pad(items: list[Any]) -> Any:
    inputs, targets = zip(*items, strict=True)
    words = pad_sequence(list(inputs), batch_first=True)
    mask = torch.arange(words.size(1)) < torch.tensor([[len(text)] for text in inputs])
    padded = pad_sequence(list(targets), batch_first=True, padding_value=PADDING)
    return {"words": words, "mask": mask}, padded


def language(**parts: Any) -> Task:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(WORDS, (3 + n % 6,), generator=generator) for n in range(SAMPLES)]
    data = [(text[:-1], text[1:]) for text in texts]
    usual: dict[str, Any] = {
        "model": Language,
        "loss": evener.loss(total=total, count=lambda targets: (targets != PADDING).sum()),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
        "train": data,
        "evaluate": data[:11],
        "collate": pad,
        "batch_size": 9,
        "epochs": 3,
        "metrics": {},
    }
    return Task(**(usual | parts))


def deep(width: int = 6) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), *layers, nn.Linear(6, 3))


def layers() -> Task:
    return _task(model=deep, metrics={})


def penalised() -> Task:
    return _task(
        model=deep,
        penalty=lambda model: 0.1 * sum((p.norm() for p in model.parameters()), start=torch.zeros(())),
    )


def normalized() -> Task:
    def model() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(*blocks, evener.nn.Dropout(0.3), nn.Linear(6, 3))

    return _task(model=model, batch_size=12, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))


class Choosing(nn.Module):
    """Samples choose a layer; one is chosen by few of them, one by none."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.heads[int(row[0] > 0.9)](row) for row in x]
        return torch.stack(rows)


def choosing() -> Task:
    """Inside of a block code may do what it likes, as parameters without a gradient."""
    return _task(
        model=lambda: nn.Sequential(nn.Linear(6, 6), Choosing(), nn.Tanh(), Choosing(), nn.Linear(6, 3)),
        batch_size=3,
    )


# Training
