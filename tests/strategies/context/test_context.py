"""Sequences divided over ranks against one device, in float64."""

from __future__ import annotations

from typing import Any

import pytest

from evener.distributed.environment import Environment
from evener.strategies.context.context import ContextParallel
from evener.tools.verify import Trajectory, relative_error
from tests.comparing import handed_on, trained_by_hand, worst
from tests.strategies.sentences import (
    Ulysses,
    count,
    evaluated,
    multi,
    ordinary,
    total,
    trajectory,
)
from tests.tiers import NIGHTLY


@pytest.mark.parametrize(
    ("size", "name", "settings"),
    [
        pytest.param(2, "task", {"clip_norm": 0.05}, marks=NIGHTLY),
        pytest.param(3, "task", {"micro_batch": 2}, marks=NIGHTLY),
        (2, "ordinary", {"strategy": Ulysses()}),
        (3, "ordinary", {"strategy": ContextParallel(order="contiguous")}),
        pytest.param(2, "layered", {}, marks=NIGHTLY),
        (3, "layered", {"strategy": Ulysses()}),
        pytest.param(2, "multi", {"micro_batch": 2}, marks=NIGHTLY),
        (3, "multi", {"bucket_mb": 1e-5}),
        pytest.param(2, "dropping", {"micro_batch": 3}, marks=NIGHTLY),
        (3, "dropping", {}),
        (3, "penalised", {"clip_norm": 0.1}),
    ],
    ids=str,
)
def test_weights_are_those_of_one_device(ranks: Any, size: int, name: str, settings: dict[str, Any]) -> None:
    reference = trajectory(name, Environment(), **(settings | {"strategy": "single"}))
    divided = ranks(size).run(trajectory, name, **settings)
    assert worst(reference.weights, divided[0].weights) <= 1e-11
    assert all(one.losses == pytest.approx(reference.losses, rel=1e-11) for one in divided)
    assert len({one.digest for one in divided}) == 1, "replicas differ"


def over_two_axes(name: str, **settings: Any) -> Trajectory:
    return trajectory(name, mesh="data=2,context=2", **settings)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("task", {"balance": "2,1", "clip_norm": 0.1}, marks=NIGHTLY),
        ("dropping", {"balance": "1,0", "micro_batch": 2}),
        pytest.param("multi", {"balance": "3,1"}, marks=NIGHTLY),
    ],
    ids=str,
)
def test_samples_and_positions_are_divided_together(ranks: Any, name: str, settings: dict[str, Any]) -> None:
    reference = trajectory(name, Environment(), **(settings | {"strategy": "single", "balance": "equal"}))
    divided = ranks(4).run(over_two_axes, name, **settings)
    assert worst(reference.weights, divided[0].weights) <= 1e-11
    assert all(one.losses == pytest.approx(reference.losses, rel=1e-11) for one in divided)
    assert len({one.digest for one in divided}) == 1, "replicas differ"


def test_evaluation_sees_whole_sequences_and_predictions_are_in_order(ranks: Any) -> None:
    ((metrics, outputs),) = ranks(1).run(evaluated)
    for size, settings in ((3, {}), (4, {"mesh": "data=2,context=2", "balance": "2,1"})):
        for found, predicted in ranks(size).run(evaluated, **settings):
            assert found == pytest.approx(metrics, rel=1e-12)
            assert relative_error(outputs, predicted) <= 1e-12


def test_a_checkpoint_is_taken_into_every_other_strategy(ranks: Any) -> None:
    reference = trajectory("multi", Environment(), strategy="single", steps=6)
    places = (("context", 3), ("single", 1), ("context", 2), ("ddp", 3))
    where = [(size, {"strategy": strategy}) for strategy, size in places]
    found = handed_on(ranks, multi, where, (1, 3, 4, 6))
    for state in found:
        assert worst(reference.weights, state["model"]) <= 1e-11


def test_a_loop_of_the_users_own(ranks: Any) -> None:
    (weights,) = ranks(1).run(trained_by_hand, ordinary, total, count, strategy="single")
    for found in ranks(2).run(trained_by_hand, ordinary, total, count, strategy="context"):
        assert worst(weights, found) <= 1e-11
