"""What is not finite is named by step, rank and parameter, whatever the strategy."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from evener.engine import Engine
from evener.errors import DivergenceError
from tests.breaking import brittle

EVERY = [
    ("ddp", {}),
    ("sharded", {"strategy_option": ("zero=1",)}),
    ("sharded", {"strategy_option": ("zero=2",)}),
    ("sharded", {"strategy_option": ("zero=3",)}),
    ("tensor", {}),
    ("pipeline", {}),
    ("ddp", {"bucket_mb": 1e-4}),
]


def stopped(strategy: str, settings: dict[str, Any], by_hand: bool = False, late: bool = False) -> str:
    with mock.patch("evener.ledger.is_late", return_value=late):
        engine = Engine(brittle({13: 100.0}), strategy=strategy, device="cpu", **settings)
        with engine:
            try:
                for batch in engine.batches():
                    if by_hand:
                        (micro,) = batch.micro_batches
                        engine.backward(
                            engine.loss.total(engine.model(micro.inputs), micro.targets), len(micro.samples)
                        )
                        engine.update()
                    else:
                        engine.step(batch)
            except DivergenceError as error:
                return str(error)
    return "nothing was said"


def step_of(sample: int) -> int:
    with Engine(brittle(), device="cpu", strategy="single") as engine:
        return next(b.index for b in engine.batches() if sample in b.micro_batches[0].samples)


@pytest.mark.parametrize(("strategy", "settings"), EVERY, ids=str)
def test_a_gradient_names_step_rank_and_parameter_on_every_rank(
    ranks: Any, strategy: str, settings: dict[str, Any]
) -> None:
    said = ranks(2).run(stopped, strategy, settings)
    expected = f"a gradient is not finite in step {step_of(13)} on rank "
    for message in said:
        assert message.startswith(expected)
        assert ": that of inner.bias; " in message
    assert len(set(said)) == 1


@pytest.mark.parametrize(("strategy", "settings"), EVERY[:1] + EVERY[3:4], ids=str)
def test_a_late_device_names_it_too(ranks: Any, strategy: str, settings: dict[str, Any]) -> None:
    for message in ranks(2).run(stopped, strategy, settings, late=True):
        assert ": that of inner.bias; " in message


@pytest.mark.parametrize(("strategy", "settings"), EVERY[:5], ids=str)
def test_a_loop_by_hand_names_it_too(ranks: Any, strategy: str, settings: dict[str, Any]) -> None:
    for message in ranks(2).run(stopped, strategy, settings, by_hand=True):
        assert "a gradient is not finite on rank " in message
        assert ", that of inner.bias; " in message


@pytest.mark.parametrize(
    ("strategy", "devices"), [("single", None), ("data_parallel", "cpu:0,cpu:1"), ("layers", "cpu:0,cpu:1")]
)
def test_one_process_names_it_too(strategy: str, devices: str | None) -> None:
    assert ": that of inner.bias; " in stopped(strategy, {"devices": devices})
