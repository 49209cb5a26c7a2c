"""What asynchronous training refuses, and in which words."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError, TaskError
from evener.strategies import Asynchronous
from evener.tools.verify import verify
from evener.training.engine import Engine
from evener.training.factory import check_division
from tests.strategies.local_steps.test_local_steps import adam, samples, task

REFUSED: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "fp16"},
    "micro_batch=auto": {"micro_batch": "auto"},
    "optimizer_state=8bit": {"optimizer_state": "8bit"},
    "compress=int8": {"compress": "int8"},
    "allreduce=ring": {"allreduce": "ring"},
    "offload": {"offload": "optimizer"},
    "cannot be laid over a mesh": {"mesh": "data=2,tensor=2"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_together_is_refused_before_ranks_start(words: str) -> None:
    processes = 4 if "mesh" in words else 2
    with pytest.raises(ConfigurationError, match=words):
        check_division(RunConfig(device="cpu", strategy=Asynchronous(), **REFUSED[words]), processes)


@pytest.mark.parametrize(
    "option",
    [
        {"buffer": -1},
        {"staleness": -2},
        {"sync_every": 0},
        {"delayed_nesterov": -1},
        {"damping": -0.5},
        {"damping": 1.5},
        {"damping": float("nan")},
    ],
)
def test_options_out_of_range_are_refused(option: dict[str, Any]) -> None:
    name, value = next(iter(option.items()))
    with pytest.raises(ConfigurationError, match=f"{name} is {value}"):
        Asynchronous(**option)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(samples())


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters)


class Holding(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        self.own = list(parameters)
        super().__init__(self.own, lr=0.1)


def holding(parameters: Any) -> torch.optim.Optimizer:
    return Holding(parameters)


def sparse() -> nn.Module:
    return nn.Embedding(4, 4, sparse=True)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "iterable data set": ({"train": Stream()}, {}),
    "LBFGS": ({"optimizer": lbfgs}, {}),
    "keeps its parameters in 'own'": ({"optimizer": holding}, {}),
    "sparse ones": ({"model": sparse}, {}),
    "partitioned by sample": ({"partition": "sample"}, {}),
    "non_finite=skip": ({}, {"non_finite": "skip"}),
    "skipping samples": ({}, {"on_bad_sample": "skip"}),
    "balance=auto": ({}, {"balance": "auto"}),
    "max_shares=5": ({}, {"max_shares": "5"}),
    "share_multiple_of=2": ({}, {"share_multiple_of": 2}),
    "delayed_nesterov is for": ({"optimizer": adam}, {"strategy": Asynchronous(delayed_nesterov=2)}),
}


@pytest.mark.parametrize("words", CASES)
def test_tasks_that_it_cannot_train_are_refused(words: str) -> None:
    changed, settings = CASES[words]
    config = RunConfig(**{"device": "cpu", "strategy": Asynchronous()} | settings)
    with pytest.raises((ConfigurationError, TaskError), match=words):
        steps(config, **changed)


def steps(config: RunConfig, **changed: Any) -> None:
    with Engine(task(**changed), config) as engine:
        for batch in engine.batches():
            engine.step(batch)


def refused(config: RunConfig) -> str:
    with pytest.raises(ConfigurationError) as raised:
        steps(config)
    return str(raised.value)


def test_shares_are_refused_on_all_ranks(ranks: Any) -> None:
    config = RunConfig(device="cpu", strategy=Asynchronous(), balance="3,1")
    assert all("balance=3,1" in said for said in ranks(2).run(refused, config))


def test_a_loop_of_ones_own_is_told_to_use_step() -> None:
    with pytest.raises(ConfigurationError, match=r"engine.step\(batch\)"):
        by_hand(RunConfig(device="cpu", dtype="float64", strategy=Asynchronous()))


def by_hand(config: RunConfig) -> None:
    with Engine(task(), config) as engine:
        for _ in engine.batches():
            engine.backward(engine.model(samples()[0][0][None]).sum(), 1)
            engine.update()


def test_verify_says_how_to_compare_a_run() -> None:
    with pytest.raises(ConfigurationError, match="--replay RUN"):
        verify(partial(task), RunConfig(device="cpu", steps=8), processes=2, strategy=Asynchronous())
