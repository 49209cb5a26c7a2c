"""Blocks that are computed again are the same training, and a budget is held, at the least time that was measured."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from evener.engine import Engine
from evener.observer import Observer
from evener.strategies.sharded import Sharded
from evener.task import Task
from tests import tasks
from tests.tasks import classes, draws

WIDTH, SAMPLES, LENGTH = 8, 90, 24


class Block(nn.Module):
    """All that a repetition could do twice, or otherwise: statistics, random numbers of both kinds, a power iteration,
    a keyword, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH)
        self.drop, self.torchs = evener.nn.Dropout(0.2), nn.Dropout(0.0)
        self.down = nn.utils.parametrizations.spectral_norm(nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
        y = self.torchs(torch.tanh(self.norm(self.up(x))))
        return x + scale * self.down(self.drop(y)), scale * 0.9


class Tower(nn.Module):
    """The last two are one block, called twice."""

    def __init__(self, block: Any = Block) -> None:
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.blocks.append(self.blocks[-1])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.stem(x), torch.ones(())
        for block in self.blocks:
            x, scale = block(x, scale=scale)
        scores: Tensor = self.head(x)
        return scores


def tower(**parts: Any) -> Task:
    usual = {"train": TensorDataset(draws(SAMPLES, 6), classes(SAMPLES, 3)), "model": Tower, "epochs": 9}
    adam = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)  # noqa: E731
    return tasks._task(**(usual | {"evaluate": None, "optimizer": adam, "batch_size": 40} | parts))


class Told(Observer):
    everywhere = True

    def __init__(self) -> None:
        self.words: list[str] = []

    def event(self, record: Any) -> None:
        self.words.append(record.words)


def trained(task: Any, recompute: str | None, steps: int = 7, **settings: Any) -> dict[str, Any]:
    told, settings = Told(), {"device": "cpu", "dtype": "float64"} | settings
    with Engine(task(), recompute=recompute, steps=steps, observers=[told], **settings) as engine:
        losses = [engine.step(batch).loss for batch in engine.batches()]
        state = {name: value.detach().clone() for name, value in engine.learner.tensors().items()}
        return {"losses": losses, "state": state, "told": told.words, "words": engine.recomputing.words}


def pair(task: Any, recompute: str, **settings: Any) -> tuple[float, list[str], str]:
    """How far apart a training is from the same one that keeps all blocks, in its losses, weights and buffers; and what
    was said."""
    kept, other = trained(task, None, **settings), trained(task, recompute, **settings)
    torch.testing.assert_close(other["losses"], kept["losses"], rtol=0, atol=0)
    errors = [
        float((other["state"][name] - value).abs().max())
        for name, value in kept["state"].items()
        if value.numel()
    ]
    return max(errors), other["told"], other["words"]


HOW = ["blocks", "75%"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("micro_batch", [None, 17])
def test_it_is_the_same_training(how: str, micro_batch: int | None) -> None:
    error, told, words = pair(tower, how, strategy="single", micro_batch=micro_batch)
    assert error == 0
    assert ("instead of" in words) == (told == [words]) == (how != "blocks"), (told, words)


class Words(nn.Module):
    """From words (N, T) to scores (N, 11, T), with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.place = nn.Parameter(0.1 * draws(LENGTH, 12))
        layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(4))
        self.out = nn.Linear(12, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.place[evener.nn.positions(words.shape[1])]
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.out(x)
        return scores.transpose(1, 2)


def words() -> Task:
    found = classes(40 * (LENGTH + 1), 11).view(40, -1)
    return tower(model=Words, train=TensorDataset(found[:, :-1], found[:, 1:]), batch_size=13, metrics={})


EVERY: dict[str, Any] = {
    "uneven": (2, tower, {"strategy": "ddp", "balance": "2,1", "micro_batch": 24}),
    "a rank without samples": (2, tower, {"strategy": "ddp", "balance": "1,0"}),
    "rows": (2, tower, {"strategy": Sharded(zero=2, owns="2,1")}),
    "weights in parts": (2, words, {"strategy": Sharded(zero=3)}),
    "tensor": (2, words, {"strategy": "tensor"}),
    "pipeline": (2, words, {"strategy": "pipeline", "strategy_option": ("balance=equal",)}),
    "context": (2, words, {"strategy": "context"}),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", EVERY)
def test_it_is_the_same_training_on_ranks(ranks: Any, case: str, how: str) -> None:
    world, task, settings = EVERY[case]
    for error, told, said in ranks(world).run(pair, task, how, **settings):
        assert error < 1e-12
        print(said, told)
        assert "instead of" in said or how == "blocks"
