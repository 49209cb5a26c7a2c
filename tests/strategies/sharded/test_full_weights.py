"""Whole weights that the ranks of a host have in common: nobody writes to them while another computes with them."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener.components.sharded_tensor.local import changeable
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.strategies.sharded import zero_reduce as summing
from evener.strategies.sharded.zero import Zero
from evener.training.engine import Engine
from evener.training.run import Run
from tests.strategies.sharded.test_zero import recurrent
from tests.tasks import classes, draws


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def weights_in_a_late_backward() -> list[bool]:
    """Whether they are what they were in forward, when rank 1 waits in backward behind its last gradient."""
    seen: list[bool] = []
    weights: list[Tensor] = []

    def look(weight: Tensor) -> None:
        time.sleep(0.3 * dist.get_rank())
        seen.append(torch.equal(weight, weights[-1]))

    def forward(model: Shift, x: Tensor) -> Tensor:
        if not weights:
            model.bias.register_post_accumulate_grad_hook(look)
        weights.append(model.bias.detach().clone())
        shifted: Tensor = model(x)
        return shifted

    data = TensorDataset(draws(12, 4), classes(12, 4))
    task = Task(
        model=Shift,
        loss=nn.CrossEntropyLoss(),
        train=data,
        forward=forward,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 1.0),
    )
    with Engine(
        task, RunConfig(strategy=Zero(in_common=True), batch_size=4, epochs=1, device="cpu")
    ) as engine:
        for batch in engine.batches():
            engine.step(batch)
    return seen


def test_no_rank_updates_while_another_is_in_backward(ranks: Any) -> None:
    assert ranks(2).run(weights_in_a_late_backward) == [[True] * 3] * 2


def words_of_a_run() -> str:
    config = RunConfig(strategy=Zero(), device="cpu", steps=2)
    with Session(device="cpu") as session:
        done = Run(recurrent(), config, session, show=False).execute()
    assert done is not None
    return done.summary.allreduce


def test_a_whole_run_has_weights_in_common(ranks: Any) -> None:
    assert ranks(2).run(words_of_a_run) == ["to owners by shared-memory, weights in common"] * 2


def where_there_is_no_room() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summing, "Common", without_memory)
        with Engine(recurrent(), RunConfig(strategy=Zero(in_common=True), device="cpu", steps=1)) as engine:
            for batch in engine.batches():
                engine.step(batch)
            return engine.learner.synchronizer.words


def without_memory(*args: Any) -> None:
    raise ConfigurationError("no memory")


def test_where_there_is_none_every_rank_has_whole_weights(ranks: Any) -> None:
    assert (
        ranks(2).run(where_there_is_no_room)
        == ["to owners by shared-memory, weights on every rank: no memory"] * 2
    )


def what_the_others_see() -> bool:
    """Whether rank 1 has its weights while rank 0 has others for a trial, as before the first step of a plan."""
    with Engine(recurrent(), RunConfig(strategy=Zero(in_common=True), device="cpu", steps=1)) as engine:
        model, before = engine.model, engine.state_dict()["model"]
        with engine.learner.synchronizer.forward(), ExitStack() as stack:
            if engine.session.rank == 0:
                for parameter in model.parameters():
                    changeable(parameter, stack).add_(1.0)
            dist.barrier()
            seen = [parameter.detach().clone() for parameter in model.parameters()]
            dist.barrier()
        after = engine.state_dict()["model"]
        assert all(torch.equal(after[name], value) for name, value in before.items())
        changed = [
            not torch.equal(now, before[name])
            for (name, _), now in zip(model.named_parameters(), seen, strict=True)
        ]
        return all(changed) if engine.session.rank == 0 else not any(changed)


def test_what_a_rank_changes_for_a_trial_no_other_rank_sees(ranks: Any) -> None:
    assert ranks(2).run(what_the_others_see) == [True, True]
