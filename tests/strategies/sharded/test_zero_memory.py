"""Each rank holds the part of the training's state that was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.strategies.sharded.zero import Zero
from evener.training.engine import Engine
from tests.strategies.seven import normalised, penalised, plain, step_by_hand  # noqa: F401 (some by name)
from tests.strategies.sharded.test_zero import WORDS, task
from tests.tiers import ALWAYS, NIGHTLY, spread


def wide() -> Task:
    layers = lambda: nn.Sequential(  # noqa: E731
        nn.Embedding(2000, 64), nn.Flatten(), nn.Linear(320, 700), nn.Tanh(), nn.Linear(700, WORDS)
    )
    return task(model=layers)


def held(strategy: Any, **settings: Any) -> tuple[int, int, int]:
    """Bytes of gradients when they are summed, of the optimizer's state, and of the model's trained weights whole."""
    nbytes = {"gradients": 0}

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nbytes["gradients"] = sum(storages(p.grad for p in engine.model.parameters()))

    config = RunConfig(strategy=strategy, device="cpu", steps=2, **settings)
    with Engine(wide(), config) as engine:
        engine.learner.optimizer.register_step_pre_hook(look)
        for batch in engine.batches():
            engine.step(batch)
        state = [value for entries in engine.learner.optimizer.state.values() for value in entries.values()]
        whole = sum(tensor.nbytes for tensor in engine.learner.tensors().values())
        assert not list(gradients_of_wholes(engine)), "of whole weights no gradient is left"
        return nbytes["gradients"], sum(storages(state)), whole


def storages(tensors: Any) -> list[int]:
    """Bytes of the memory that tensors lie in, each counted once, but for numbers alone."""
    found = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t is not None and t.ndim
    }
    return list(found.values())


def gradients_of_wholes(engine: Engine) -> Any:
    with engine.learner.synchronizer.forward():
        yield from (p.grad for p in engine.model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("size", "shard_sizes", "parts"),
    spread(
        [
            (2, None, (0.5, 0.5)),
            (2, "2,1", (2 / 3, 1 / 3)),
            (3, None, (1 / 3,) * 3),
            (3, "3,1,1", (0.6, 0.2, 0.2)),
        ],
        *(ALWAYS, NIGHTLY, NIGHTLY, ALWAYS),
    ),
    ids=str,
)
def test_each_rank_holds_the_part_that_was_asked_for(
    ranks: Any, size: int, shard_sizes: str | None, parts: tuple[float, ...]
) -> None:
    for micro_batch in (None, 4):
        found = ranks(size).run(held, Zero(shard_sizes=shard_sizes), bucket_mb=0.1, micro_batch=micro_batch)
        for (gradients, state, whole), part in zip(found, parts, strict=True):
            assert gradients == pytest.approx(part * whole, rel=0.05)
            assert state == pytest.approx(2 * part * whole, rel=0.05), (
                "AdamW keeps two numbers of each weight"
            )


def test_the_first_stage_divides_the_optimizer_alone(ranks: Any) -> None:
    for gradients, state, whole in ranks(2).run(held, Zero(stage=1)):
        assert gradients == pytest.approx(whole, rel=0.05)
        assert state == pytest.approx(whole, rel=0.05)
