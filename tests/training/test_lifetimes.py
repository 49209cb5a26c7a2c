"""Nothing of a step outlives it: no batch, no output, no graph and no gradient, without the user's doing anything."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from evener.hardware.memory import MemoryTracker
from tests.observers import Remembering

FEATURES, SAMPLES, BATCH = 6, 48, 8


class Traced(nn.Module):
    """Remembers what went through it, without keeping it alive, and what of earlier calls is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.seen: list[list[weakref.ref[Tensor]]] = []
        self.alive: list[int] = []
        self.fails_at = -1

    def forward(self, x: Tensor) -> Tensor:
        self.alive.append(self.still_there())
        hidden = self.layer(x)
        out: Tensor = hidden.tanh()
        self.seen.append([weakref.ref(each) for each in (x, hidden, out)])
        if len(self.seen) == self.fails_at:
            raise ValueError("a mistake of the user's")
        return out

    def still_there(self) -> tuple[int, int]:
        """Inputs of earlier calls, and tensors that were made of them."""
        return (
            sum(refs[0]() is not None for refs in self.seen),
            sum(ref() is not None for refs in self.seen for ref in refs[1:]),
        )


def task(**parts: Any) -> evener.Task:
    usual: dict[str, Any] = {
        "model": Traced,
        "loss": nn.MSELoss(),
        "optimizer": torch.optim.AdamW,
        "train": TensorDataset(torch.rand(SAMPLES, FEATURES), torch.rand(SAMPLES, FEATURES)),
        "batch_size": BATCH,
        "epochs": 2,
    }
    return evener.Task(**(usual | parts))


@pytest.fixture(autouse=True)
def without_collections() -> Iterator[None]:
    """What only the collector of garbage would find is alive."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def engine_of(given: evener.Task | None = None, **settings: Any) -> evener.Engine:
    return evener.Engine(given or task(), **({"device": "cpu", "strategy": "single"} | settings))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"micro_batch": 3},
    "pieces": {"micro_batch": "auto"},
    "bf16": {"precision": "bf16"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_of_a_step_is_alive_in_the_next(name: str) -> None:
    with engine_of(**SETTINGS[name]) as engine:
        for batch in engine.batches():
            engine.step(batch)
        calls = len(engine.model.alive) // 12
        assert calls == (3 if name == "micro-batches" else 1)
        # Of inputs those of the same batch.
        assert set(engine.model.alive) == {(earlier, 0) for earlier in range(calls)}


def test_nothing_of_a_step_is_alive_in_the_next_of_a_whole_run() -> None:
    class Looking(evener.Observer):
        def step(self, record: Any) -> None:
            told.append(record.step)

    told: list[int] = []
    traced = Traced()
    evener.fit(task(model=lambda: traced), device="cpu", processes=1, show=False, observers=[Looking()])
    assert len(told) == 12
    assert set(traced.alive) == {(0, 0)}


def test_nothing_of_an_evaluation_is_alive_while_it_goes_on_or_after_it() -> None:
    data = TensorDataset(torch.rand(20, FEATURES), torch.rand(20, FEATURES))
    with engine_of(task(evaluate=data, metrics={"error": nn.L1Loss()})) as engine:
        engine.evaluate()
        engine.predict(data)
        assert len(engine.model.alive) == 6
        assert set(engine.model.alive) == {(0, 0)}
        assert engine.model.still_there() == (0, 0)


def test_nothing_is_held_between_steps_but_what_trains() -> None:
    """Counted tensor by tensor: parameters and the optimizer's state, and the batch that was read ahead."""
    held, kinds = [], []
    with MemoryTracker() as account, engine_of(epochs=3) as engine:
        account.name("parameters", engine.model.parameters())
        for batch in engine.batches():
            engine.step(batch)
            del batch
            assert all(parameter.grad is None for parameter in engine.model.parameters())
            state = [v for s in engine.learner.optimizer.state.values() for v in s.values()]
            account.name("optimizer", state)
            account.name("inputs", engine._upcoming.micro_batches[0].inputs[None] if engine._upcoming else [])
            held.append(account.held)
            kinds.append({kind: nbytes for kind, nbytes in account.by_category().items() if nbytes})
    assert len(set(held[1:-1])) == 1
    assert "gradients" not in kinds[2]


def test_nothing_is_left_of_a_step_that_failed() -> None:
    with engine_of(micro_batch=4) as engine:
        batches = engine.batches()
        engine.step(next(batches))
        engine.model.fails_at = 4  # the second micro-batch of the second step: the first has given gradients
        with pytest.raises(ValueError, match="a mistake"):
            engine.step(next(batches))
        assert all(parameter.grad is None for parameter in engine.model.parameters())
        inputs, made = engine.model.still_there()
        assert (inputs, made) == (2, 0), (
            "the batch that failed is at hand still, and nothing that was made of it"
        )


class Caching(nn.Module):
    """Keeps a table that it makes when it is first called, as rotary embeddings do, for whoever calls next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(FEATURES, FEATURES), None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(FEATURES, device=x.device).float()
        out: Tensor = self.layer(x) * self.table
        return out


def test_what_a_model_makes_in_evaluation_serves_in_training() -> None:
    """It would not in inference mode: its tensors cannot be saved for backward."""
    data = TensorDataset(torch.rand(20, FEATURES), torch.rand(20, FEATURES))
    told = Remembering()
    with engine_of(task(model=Caching, evaluate=data), observers=[told]) as engine:
        engine.evaluate()
        assert isinstance(engine.model.table, Tensor)
        for batch in engine.batches():
            engine.step(batch)
    assert len(told.steps) == 12
