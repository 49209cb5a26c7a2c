"""Parts over the ranks together with stages of a pipeline, and with divided layers, against one device, in float64."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.components.sharded_tensor.shard_spec import by_axes
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.distributed.environment import Environment
from evener.errors import DivergenceError
from evener.nn.context import current
from evener.strategies.pipeline.pipeline import Pipeline
from evener.strategies.sharded.sharded import Sharded
from evener.strategies.tensor.tensor import TensorParallel
from evener.testing import check_strategy
from evener.tools.verify import Trajectory, record
from evener.training.engine import Engine
from tests.comparing import handed_on, worst
from tests.ids import placeless
from tests.strategies import stages, wide
from tests.tasks import _task

STAGES = "pipeline=2,shard=2"
FEATURES = "shard=2,tensor=2"


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def nightly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


def exact(ranks: Any, size: int, task: str, settings: dict[str, Any], **division: Any) -> None:
    reference = trajectory(task, Environment(), strategy="single", **settings)
    divided = ranks(size).run(trajectory, task, **settings, **division)
    assert worst(reference.weights, divided[0].weights) <= 1e-11
    assert all(one.losses == pytest.approx(reference.losses, rel=1e-11) for one in divided)
    assert len({one.digest for one in divided}) == 1, "ranks differ"


def trajectory(task: str, environment: Environment | None = None, **settings: Any) -> Trajectory:
    usual: dict[str, Any] = {"dtype": "float64", "device": "cpu", "steps": 5}
    return record(task, None, RunConfig(**(usual | settings)), environment)


# Stages


def staged(zero: int, shard_sizes: str | None = None, **options: Any) -> tuple[Any, ...]:
    return Pipeline(**options), Sharded(zero=zero, shard_sizes=shard_sizes)


@pytest.mark.parametrize(
    ("name", "strategy", "balance", "settings"),
    [
        nightly("language", staged(2, "3,1"), "5,1", {"clip_norm": 0.1}),
        nightly("layers", staged(1, schedule="zero-bubble"), "0,1", {"micro_batch": 4}),
        slow("language", staged(1, "1,2", schedule="gpipe"), "1,2", {"micro_batch": 4, "bucket_mb": 1e-5}),
        nightly("normalized", staged(2), "3,1", {"micro_batch": 4}),
        slow("penalised", staged(2, "0,1"), "3,1", {"clip_norm": 0.1}),
        nightly("choosing", staged(2), "3,1", {}),
        nightly("choosing", staged(1, "2,1", cut="2"), "1,3", {"clip_norm": 0.05}),
        slow(
            "language",
            staged(2, "1,3", schedule="interleaved", stages_per_rank=2, cut="blocks.0,blocks.2,norm"),
            "2,1",
            {},
        ),
    ],
    ids=str,
)
def test_stages_have_owners_of_their_rows(
    ranks: Any, name: str, strategy: Any, balance: str, settings: dict[str, Any]
) -> None:
    task = f"{stages.__name__}:{name}"
    exact(ranks, 4, task, settings, strategy=strategy, mesh=STAGES, balance=balance)


def held(task: Any, strategy: Any, mesh: str) -> tuple[dict[tuple[str, ...], int], int]:
    """How many elements a rank holds of what is divided over which axes, and how many are in the optimizer's state."""
    with Engine(task(), RunConfig(strategy=strategy, mesh=mesh, device="cpu", steps=1)) as engine:
        for batch in engine.batches():
            engine.step(batch)
        counts = {
            axes: sum(p.numel() for p in parameters)
            for axes, parameters in by_axes(engine.model.parameters()).items()
        }
        state = sum(entries["exp_avg"].numel() for entries in engine.learner.optimizer.state.values())
        return counts, state


def test_a_rank_holds_its_rows_of_its_stage(ranks: Any) -> None:
    """Three blocks of 48 elements and a layer of 21: the first stage has one block."""
    found = ranks(4).run(held, stages.normalized, staged(2, "2,1", cut="1"), STAGES)
    assert all(counts.keys() == {(), ("pipeline", "shard")} for counts, _ in found), "alike on all ranks"
    sizes = [counts["pipeline", "shard"] for counts, _ in found]
    assert [state for _, state in found] == sizes
    first, second = sum(sizes[:2]), sum(sizes[2:])
    assert (first, second) == (48, 2 * 48 + 21)
    assert sizes[0] == pytest.approx(2 / 3 * first, abs=6)
    assert sizes[2] == pytest.approx(2 / 3 * second, abs=6)


@pytest.mark.slow
def test_the_battery_of_strategies_on_stages(ranks: Any) -> None:
    without = ("unused", "by_hand", "error")
    ranks(4).run(check_strategy, staged(2, "2,1"), mesh=STAGES, without=without, timeout=300)


class Root(nn.Module):
    """In step 1 the gradient of its weight is no number, on the first rank of the second stage alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        scope = current()
        fails = scope is not None and scope.step == 1 and 2 * dist.get_rank() == dist.get_world_size()
        return x + (0 * self.weight).sqrt() if fails else x + self.weight


def rooted() -> Task:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Root(), nn.Linear(6, 3))

    return _task(model=model)


def diverging(strategy: Any, mesh: str | None) -> tuple[str, float]:
    began = time.perf_counter()
    config = RunConfig(strategy=strategy, mesh=mesh, device="cpu", steps=3, clip_norm=1.0, dtype="float64")
    with pytest.raises(DivergenceError) as caught:
        record(rooted, None, config)
    return str(caught.value), time.perf_counter() - began


@pytest.mark.parametrize(
    ("size", "strategy", "mesh"), [(2, Pipeline(cut="1"), None), (4, staged(2, cut="1"), STAGES)], ids=str
)
def test_a_gradient_that_is_no_number_stops_all_stages(
    ranks: Any, size: int, strategy: Any, mesh: str | None
) -> None:
    for words, seconds in ranks(size).run(diverging, strategy, mesh):
        assert f"a gradient is not finite in step 1 on rank {size // 2}" in words
        assert seconds < 30


# Divided layers


@pytest.mark.parametrize(
    ("name", "options", "balance", "settings"),
    [
        nightly("words", {}, "3,1", {"clip_norm": 0.1}),
        nightly("mlp", {"reshard": False}, "0,1", {"micro_batch": 3}),
        slow("words", {"wrap": "encoder.layers.*,decoder"}, "1,2", {"micro_batch": 4}),
        slow("words", {"offload": True}, "1,1", {}),
        nightly("scores_apart", {}, "1,3", {"micro_batch": 3, "clip_norm": 0.1}),
        nightly("convolutions", {"wrap": ""}, "3,1", {}),
        nightly("gated", {}, "3,1", {}),
    ],
    ids=str,
)
def test_divided_layers_are_in_parts(
    ranks: Any, name: str, options: dict[str, Any], balance: str, settings: dict[str, Any]
) -> None:
    strategy = Sharded(**options), TensorParallel()
    task = f"{wide.__name__}:{name}"
    exact(ranks, 4, task, settings, strategy=strategy, mesh=FEATURES, balance=balance)


@pytest.mark.nightly
def test_the_battery_of_strategies_on_divided_layers(ranks: Any) -> None:
    without = ("idle", "tied", "accumulation", "unused", "by_hand", "several", "buffers", "sparse")
    ranks(4).run(check_strategy, (Sharded(), TensorParallel()), mesh=FEATURES, without=without, timeout=300)


# State


@pytest.mark.parametrize(
    ("task", "places"),
    [
        (stages.normalized, ((staged(2, "3,1", cut="1"), 4, STAGES), ("ddp", 2, None))),
        slow(stages.normalized, (("ddp", 3, None), (staged(1, "1,2"), 4, STAGES))),
        nightly(wide.words, (((Sharded(), TensorParallel()), 4, FEATURES), ("single", 1, None))),
        slow(wide.words, (("tensor", 2, None), ((Sharded(), TensorParallel()), 4, FEATURES))),
    ],
    ids=placeless,
)
def test_a_checkpoint_is_taken_into_every_other_strategy(ranks: Any, task: Any, places: Any) -> None:
    reference = trajectory(f"{task.__module__}:{task.__name__}", Environment(), strategy="single", steps=5)
    where = [(size, {"strategy": strategy, "mesh": mesh}) for strategy, size, mesh in places]
    found = handed_on(ranks, task, where, (3, 5))
    for state in found:
        assert worst(reference.weights, {name: state["model"][name] for name in reference.weights}) <= 1e-11
