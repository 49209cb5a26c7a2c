"""Embeddings that look at all ids of a batch are refused where ranks or devices divide its samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.utils.data import TensorDataset

from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.errors import TaskError
from evener.strategies.single_process.data_parallel import DataParallel
from evener.training.engine import Engine
from tests.tasks import _sgd, classes

WORDS = 9


def task(layer: Callable[[], nn.Module]) -> Task:
    return Task(
        model=lambda: nn.Sequential(layer(), nn.Linear(4, 3)),
        loss=nn.CrossEntropyLoss(),
        train=TensorDataset(classes(12, WORDS).view(-1, 1), classes(12, 3)),
        optimizer=_sgd,
        batch_size=6,
    )


def shortened() -> nn.Module:
    return nn.EmbeddingBag(WORDS, 4, max_norm=1.0)


def by_frequency() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 4, scale_grad_by_freq=True), nn.Flatten())


def said(layer: Callable[[], nn.Module], **settings: Any) -> str:
    try:
        with Engine(task(layer), RunConfig(device="cpu", **settings)) as engine:
            engine.step(next(engine.batches()))
    except TaskError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["ddp", "sharded"])
@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (shortened, "the embedding 0 has max_norm=1,"),
        (by_frequency, "the embedding 0.0 has scale_grad_by_freq"),
    ],
)
def test_ranks_that_divide_samples(ranks: Any, strategy: str, layer: Any, words: str) -> None:
    for told in ranks(2).run(said, layer, strategy=strategy):
        assert words in told


def test_devices_that_divide_samples() -> None:
    assert "max_norm=1" in said(shortened, strategy=DataParallel(devices="cpu:0,cpu:1"))


def test_where_one_sees_all_samples(ranks: Any) -> None:
    assert (
        said(shortened) == said(by_frequency) == said(shortened, strategy=DataParallel(devices="cpu:0")) == ""
    )
    assert ranks(2).run(said, shortened, strategy="pipeline") == ["", ""]
