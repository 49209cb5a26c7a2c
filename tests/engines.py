"""Engines of the tests' tasks, and what came of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from evener.core.config.run_config import RunConfig
from evener.training.engine import Engine
from tests import tasks

Weights = dict[str, Tensor]


def engine_of(name: str, **settings: Any) -> Engine:
    return Engine(getattr(tasks, name)(), RunConfig(**({"dtype": "float64", "device": "cpu"} | settings)))


def copied(engine: Engine) -> Weights:
    return {name: value.detach().clone() for name, value in engine.model.state_dict().items()}


def assert_same(a: Weights, b: Weights, tolerance: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        scale = max(1e-30, value.abs().max().item())
        assert (value - b[name]).abs().max().item() <= tolerance * scale, name


def stepped(name: str, **settings: Any) -> tuple[Weights, list[float]]:
    with engine_of(name, **settings) as engine:
        losses = [engine.step(batch).loss for batch in engine.batches()]
        return copied(engine), losses
