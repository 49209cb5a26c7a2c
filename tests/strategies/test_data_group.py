"""A loss over all samples of the batch, on unequal shares and with a rank that has none, against one device."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.distributed.environment import Environment
from evener.distributed.session import Session
from evener.nn import all_gather, data_group, without_placeholder
from evener.nn.context import scope
from evener.torch_internals.process_groups import groups_open
from evener.training.engine import Engine

SAMPLES = 29


def draws(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def repulsion(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of each sample the log of the sum of its likeness to all samples of the batch."""
    return (outputs @ all_gather(without_placeholder(outputs), data_group()).T).logsumexp(1).sum()


def task() -> Task:
    data = TensorDataset(draws(SAMPLES, 5), torch.zeros(SAMPLES))
    return Task(
        model=lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
        loss=evener.loss(total=repulsion, count=len),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=data,
        evaluate=data,
        batch_size=8,
    )


def trained(alone: bool, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Losses of all steps, the loss of the evaluation, and the weights."""
    before, config = groups_open() if not alone else 0, RunConfig(dtype="float64", steps=6, **settings)
    environment = Environment() if alone else None
    with Session("cpu", 60.0, environment) as session, Engine(task(), config, session=session) as engine:
        losses = [engine.step(batch).loss for batch in engine.batches()]
        losses.append(engine.evaluate()["loss"])
        found = {name: value.detach().clone() for name, value in engine.model.named_parameters()}
    assert alone or groups_open() == before, "the group is given back"
    return found | {"losses": torch.tensor(losses, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("balance", "micro_batch"), [("4,1,2", None), ("3,0,1", None), ("0,0,1", None), ("2,1,0", 3)]
)
def test_it_is_that_of_one_device(ranks: Any, balance: str, micro_batch: int | None) -> None:
    settings = {"micro_batch": micro_batch}
    expected = trained(True, settings)
    for found in ranks(3).run(trained, False, {**settings, "balance": balance}):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def by_hand(alone: bool, balance: str) -> dict[str, Tensor]:
    config = RunConfig(dtype="float64", steps=4, balance=balance)
    environment = Environment() if alone else None
    with Session("cpu", 60.0, environment) as session, Engine(task(), config, session=session) as engine:
        for batch in engine.batches():
            (micro,) = batch.micro_batches
            engine.backward(repulsion(engine.model(micro.inputs), micro.targets), len(micro.targets))
            engine.update()
        return {name: value.detach().clone() for name, value in engine.model.named_parameters()}


def test_a_loop_of_ones_own_has_the_group_too(ranks: Any) -> None:
    expected = by_hand(True, "equal")
    for found in ranks(2).run(by_hand, False, "1,0"):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_outside_of_a_step_the_rank_is_alone_and_its_rows_count() -> None:
    rows, group = torch.ones(3, 2), mock.sentinel.group
    assert data_group() is None
    assert without_placeholder(rows) is rows
    with scope(torch.arange(3), 0, 0, weight=1, group=lambda: group):
        assert data_group() is group
        assert without_placeholder(rows) is rows
    with scope(torch.arange(3), 0, 0, weight=0):
        assert data_group() is None
        assert without_placeholder(rows).shape == (0, 2)
