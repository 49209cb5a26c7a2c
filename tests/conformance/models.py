"""Small models of every kind that people train, as tasks with uneven batches, each with an evaluation set.

A name of this module is a task that any rank can build: ``tests.conformance.models:transformer``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import evener
from evener.core.task.task import Task
from tests.tasks import classes, draws

SAMPLES, BATCH, WORDS, LENGTH, IGNORED = 23, 9, 11, 6, -100


def _task(model: Any, train: Any, **parts: Any) -> Task:
    usual = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        "metrics": {"accuracy": evener.accuracy},
        "batch_size": BATCH,
        "epochs": 10,
    }
    return Task(model=model, train=train, evaluate=train, **(usual | parts))


def mlp() -> Task:
    layers = (nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 4))
    return _task(lambda: nn.Sequential(*(_fresh(layer) for layer in layers)), _rows(6, 4))


def _fresh(layer: nn.Module) -> nn.Module:
    """Of the same kind, drawn anew: layers of one task are not those of the next."""
    return nn.Linear(layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else layer


def _rows(features: int, kinds: int) -> TensorDataset:
    return TensorDataset(draws(SAMPLES, features), classes(SAMPLES, kinds))


def convolution() -> Task:
    """Convolutions with BatchNorm, and a residual sum."""
    return _task(Residual, TensorDataset(draws(SAMPLES, 2, 6, 6), classes(SAMPLES, 3)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU())
        self.block = nn.Sequential(
            nn.Conv2d(5, 7, 3, padding=1, bias=False),
            nn.BatchNorm2d(7),
            nn.ReLU(),
            nn.Conv2d(7, 5, 1, bias=False),
            nn.BatchNorm2d(5),
        )
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        scores: Tensor = self.head(torch.relu(x + self.block(x)).mean((2, 3)))
        return scores


def transformer() -> Task:
    """Tied embeddings, padded words, a mean over real ones."""
    loss = nn.CrossEntropyLoss(ignore_index=IGNORED)
    # Not Adam: the bias of a key has no gradient but rounding, of which that would take steps of full length.
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # noqa: E731
    return _task(Transformer, _words(), loss=loss, optimizer=sgd, metrics={})


def _words() -> TensorDataset:
    words, lengths = (
        classes(SAMPLES * (LENGTH + 1), WORDS).view(SAMPLES, -1),
        classes(SAMPLES, LENGTH - 1) + 2,
    )
    padded = torch.arange(LENGTH) >= lengths[:, None]
    return TensorDataset(words[:, :-1].masked_fill(padded, 0), words[:, 1:].masked_fill(padded, IGNORED))


class Transformer(nn.Module):
    """From words (N, T) to scores (N, WORDS, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 12)
        self.place = nn.Parameter(0.1 * draws(LENGTH, 12))
        layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList([layer, nn.TransformerEncoderLayer(12, 3, 20, 0.0, batch_first=True)])
        self.out = nn.Linear(12, WORDS, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.place[evener.nn.positions(words.shape[1])]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=words == 0)
        scores: Tensor = self.out(x)
        return scores.transpose(1, 2)


def recurrent() -> Task:
    loss = nn.CrossEntropyLoss(ignore_index=IGNORED)
    return _task(Recurrent, _words(), loss=loss, metrics={})


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.cell = nn.GRU(6, 8, batch_first=True)
        self.out = nn.Linear(8, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.cell(self.embed(words))
        scores: Tensor = self.out(hidden)
        return scores.transpose(1, 2)


def several() -> Task:
    """Two inputs, one of them sometimes unused; two outputs."""
    return _task(
        Several, SeveralData(), loss=evener.loss(total=_several_total, count=_several_count), metrics={}
    )


class SeveralData(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return (draws(SAMPLES, 4)[index], draws(SAMPLES, 3, seed=5)[index]), {
            "kind": classes(SAMPLES, 3)[index]
        }


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 6), nn.Linear(3, 6)
        self.kind, self.size = nn.Linear(6, 3), nn.Linear(6, 1)
        self.idle = nn.Linear(6, 2)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.tanh(self.left(left)) * torch.sigmoid(self.right(right))
        return self.kind(joined), self.size(joined)


def _several_total(outputs: tuple[Tensor, Tensor], targets: dict[str, Tensor]) -> Tensor:
    kind, size = outputs
    return F.cross_entropy(kind, targets["kind"], reduction="sum") + size.square().sum()


def _several_count(targets: dict[str, Tensor]) -> int:
    return len(targets["kind"])


def recommender() -> Task:
    """A large table of users, one of items whose gradients are sparse."""
    data = TensorDataset(torch.stack([classes(SAMPLES, 40), classes(SAMPLES, 7, seed=3)], 1), draws(SAMPLES))
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.3)  # noqa: E731
    return _task(Factors, data, loss=nn.MSELoss(), optimizer=sgd, metrics={})


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(40, 5), nn.Embedding(7, 5, sparse=True)

    def forward(self, pairs: Tensor) -> Tensor:
        return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1)


def dictionary() -> Task:
    """Takes and returns dictionaries, as models of Hugging Face do."""
    return _task(Named, NamedData(), loss=evener.loss(total=_named_total, count=_several_count), metrics={})


class NamedData(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        words, _ = _words()[index]
        inputs = {"input_ids": words, "attention_mask": (words > 0).long()}
        return inputs, {"kind": classes(SAMPLES, 3)[index]}


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 14), nn.GELU(), nn.Linear(14, 8))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        x = self.norm(x + self.mlp(x)) * attention_mask.unsqueeze(-1)
        pooled = x.sum(1) / attention_mask.sum(1, keepdim=True).clamp(min=1)
        return {"logits": self.head(pooled), "last_hidden_state": x}


def _named_total(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs["logits"], targets["kind"], reduction="sum")


MODELS = ("mlp", "convolution", "transformer", "recurrent", "several", "recommender", "dictionary")
