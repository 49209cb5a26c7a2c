"""Runs whose batches are divided by the costs of their samples."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from torch.utils.data import IterableDataset

import evener
from evener.cli.main import main
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.data.sampler import Order
from evener.errors import EvenerError, TaskError
from evener.hardware.async_read import ReadyValue
from evener.strategies.single_process.data_parallel import DataParallel, DeviceReplicas
from evener.training.engine import Engine
from tests import tasks
from tests.balancers import Recorder
from tests.comparing import handed_on, worst

SLOWER = (0.001, 0.003, 0.002)
"""Seconds for a cost of 1 on each rank, as far as the engine is told."""
COSTS = np.array([tasks.costly().cost(index) for index in range(tasks.SAMPLES)])  # type: ignore[operator,misc]


def trained(most_rows: int = 64, **settings: Any) -> tuple[dict[str, Any], list[Any]]:
    """The weights of a run whose ranks are of the speeds `SLOWER`, and its batches."""
    config = RunConfig(**({"device": "cpu", "dtype": "float64", "epochs": 6} | settings))
    batches = []
    with (
        mock.patch("evener.training.step.exchange.MOST_ROWS", most_rows),
        Engine(tasks.costly(), config) as engine,
    ):
        for batch in engine.batches():
            took = ReadyValue(0.002 + SLOWER[engine.session.rank] * batch.costs[engine.session.rank])
            engine.learner.work_timer.taken = lambda took=took: took  # type: ignore[method-assign,misc]
            engine.step(batch)
            batches.append(batch.without_samples())
        return dict(engine.state_dict()["model"]), batches


@pytest.mark.parametrize(
    "settings",
    [
        {"balance": "auto"},
        {"balance": "auto", "micro_batch": 3, "epochs": 2},
        {"balance": "3,0,1", "share_multiple_of": 2, "max_shares": "5,-,-"},
    ],
    ids=str,
)
def test_weights_do_not_depend_on_the_cuts(ranks: Any, settings: dict[str, Any]) -> None:
    alike = {name: settings[name] for name in ("micro_batch", "epochs") if name in settings}
    reference, alone = trained(**alike)
    divided = ranks(3).run(trained, **settings)
    assert len({batch.shares for _, batches in divided for batch in batches}) > 2
    for weights, batches in divided:
        assert worst(reference, weights) <= 1e-12
        assert [sum(batch.costs) for batch in batches] == pytest.approx([sum(batch.costs) for batch in alone])
    if "max_shares" in settings:
        for batch in divided[0][1]:
            first, second, third = batch.shares
            assert first <= 5
            assert second == 0
            assert first % 2 == 0 or third % 2 == 0


@pytest.mark.parametrize("most_rows", [64, 1], ids=["rows", "sums"])
def test_shares_of_cost_follow_speed(ranks: Any, most_rows: int) -> None:
    """The samples are those of the order, and each rank's cost follows its speed, whatever number of samples it is."""
    _, batches = ranks(2).run(trained, most_rows, balance="auto", batch_size=16, epochs=16)[0]
    late = batches[20:]
    parts = np.array([batch.costs for batch in late]).sum(axis=0)
    assert parts[0] / parts.sum() == pytest.approx(0.75, abs=0.06)
    numbers = {batch.shares for batch in late if batch.size == 16}
    assert len(numbers) > 3
    order = Order(tasks.SAMPLES, seed=0)
    for batch in late:
        costs = COSTS[order.ids(batch.epoch, batch.position, batch.position + batch.size)]
        assert costs[: batch.shares[0]].sum() == pytest.approx(batch.costs[0])


def test_a_run_goes_on_with_other_numbers_of_ranks(ranks: Any) -> None:
    places = [(2, {"balance": "auto"}), (3, {"balance": "auto"}), (2, {"micro_batch": 9})]
    (last, *_) = handed_on(ranks, tasks.costly, places, (5, 9, 14))
    whole, *_ = handed_on(ranks, tasks.costly, [(2, {"balance": "equal"})], (14,))
    assert worst(whole["model"], last["model"]) <= 1e-12


def observations() -> list[Any]:
    config = RunConfig(device="cpu", steps=5, balance="tests.balancers:Recorder")
    with Engine(tasks.costly(), config) as engine:
        for batch in engine.batches():
            engine.step(batch)
        assert isinstance(engine.balancer, Recorder)
        return engine.balancer.observed


def test_a_balancer_of_the_user_s_own_is_told_the_shares_that_it_gave(ranks: Any) -> None:
    first, *others = ranks(2).run(observations)
    expected = [tuple(Recorder(2).shares(step, size)) for step, size in enumerate((9, 9, 9, 9, 9))]
    assert [shares for _, shares, _ in first] == expected
    assert all(str(other) == str(first) for other in others)


class Told(Recorder):
    """Keeps costs instead of times."""

    def observe_costs(self, step: int, sizes: Any, costs: Any, seconds: Any) -> None:
        self.observed.append((step, tuple(sizes), tuple(costs)))


def costs_told() -> float:
    config = RunConfig(device="cpu", epochs=1, balance=f"{__name__}:Told")
    with Engine(tasks.costly(), config) as engine:
        for batch in engine.batches():
            engine.step(batch)
        assert isinstance(engine.balancer, Told)
        return sum(sum(costs) for _, _, costs in engine.balancer.observed)


def test_a_cost_is_told_in_samples_of_mean_cost(ranks: Any) -> None:
    assert ranks(2).run(costs_told) == pytest.approx([tasks.SAMPLES] * 2)


# Records


def test_records_and_summary_tell_costs(tmp_path: Path) -> None:
    result = evener.fit(tasks.costly, processes=1, run_dir=tmp_path / "run", epochs=1)
    steps = [json.loads(line) for line in (tmp_path / "run/records.jsonl").read_text().splitlines()]
    costs = [step["costs"] for step in steps if step["kind"] == "step"]
    assert [len(each) for each in costs] == [1] * 6
    assert result.summary.cost == pytest.approx(COSTS.sum()) == pytest.approx(np.sum(costs))
    assert result.summary.cost_shares == [1.0]


# What is refused


def refusal(cost: Any, **settings: Any) -> tuple[str, str]:
    """The class and the words of the error with which a run ends on this rank."""
    task = replace(tasks.costly(), cost=cost)
    try:
        with Engine(task, RunConfig(**({"device": "cpu", "steps": 4} | settings))) as engine:
            for batch in engine.batches():
                engine.step(batch)
    except EvenerError as error:
        return type(error).__name__, str(error)
    return "", ""


def other_on_a_rank(index: int) -> float:
    return 2.0 + (index == 5 and dist.get_rank() == 1)


def fails_on_a_rank(index: int) -> float:
    if index == 7 and dist.get_rank() == 1:
        raise KeyError("token_7")
    return 2.0


class Drifting:
    """A cost that becomes another one on rank 1 after the ranks have compared it; shares stay the same."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, index: int) -> float:
        self.calls += 1
        return 2.0 + 1e-6 * (self.calls > tasks.SAMPLES + 30 and dist.get_rank() == 1)


def divided_otherwise() -> tuple[str, str]:
    with mock.patch.dict(os.environ, DIFFERS_FROM="2"):
        return refusal(lambda index: 0.1 + index % 3, balance="tests.balancers:OfItsOwnMind")


def test_a_balancer_that_differs_is_not_blamed_on_costs(ranks: Any) -> None:
    for kind, said in ranks(2).run(divided_otherwise):
        assert kind == "ShareError"
        assert re.match(
            r"the ranks divide the batch of step \d in different ways: ./. on rank 0; ./. on rank 1", said
        )


@pytest.mark.parametrize(
    ("cost", "kind", "words"),
    [
        (
            other_on_a_rank,
            "DataError",
            "cost of sample 5 of the training set is 2 on rank 0, and 3 on rank 1",
        ),
        (fails_on_a_rank, "DataError", "failed for sample 7 of the training set: KeyError: 'token_7'"),
        (Drifting(), "DataError", "the ranks find different costs of the batch of step"),
        ([1.0, 2.0], "TaskError", "shape (2,), and the training set 47 samples"),
        ([1.0] * 46 + [float("nan")], "DataError", "cost of sample 46 of the training set is nan"),
    ],
    ids=["differs", "fails", "drifts", "length", "nan"],
)
def test_bad_costs_end_the_run_on_all_ranks(ranks: Any, cost: Any, kind: str, words: str) -> None:
    for found, said in ranks(2).run(refusal, cost, batch_size=8):
        assert found == kind
        assert words in said


def test_the_limits_of_local_steps_and_micro_batches_are_said(ranks: Any) -> None:
    (kind, said), _ = ranks(2).run(refusal, [1.0] * 47, strategy="local_sgd", batch_norm="local")
    assert kind == "ConfigurationError"
    assert "does not go with Task.cost" in said
    (kind, said), _ = ranks(2).run(refusal, [1.0] * 47, micro_batch=3, share_multiple_of=2)
    assert kind == "ConfigurationError"
    assert "3 samples are no multiple of share_multiple_of, 2" in said


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from ()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"cost": 3}, "Task.cost is of type int; give a function"),
        ({"cost": {"a": 1}}, "Task.cost is of type dict"),
        ({"cost": [1.0], "train": Stream()}, "an iterable data set has not"),
        ({"cost": [1.0], "partition": "sample"}, "partitioned by sample has not"),
    ],
)
def test_a_task_refuses_costs_that_cannot_be(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        replace(tasks.plain(), **parts)


def negative() -> Task:
    return replace(tasks.plain(), cost=lambda index: 10 - index)


def test_the_command_ends_with_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tests.training.test_costs:negative", "--processes", "1", "--device", "cpu"]) == 1
    assert "Task.cost of sample 10 of the training set is 0" in capsys.readouterr().err


# Several devices in one process


def test_devices_of_one_process_divide_by_cost() -> None:
    weights = []
    for strategy in (
        "single",
        DataParallel("cpu:0,cpu:1,cpu:2", "2,1,1"),
        DataParallel("cpu:0,cpu:1", "auto"),
    ):
        config = RunConfig(device="cpu", dtype="float64", strategy=strategy, epochs=3, micro_batch=5)
        with Engine(tasks.costly(), config) as engine:
            for batch in engine.batches():
                engine.step(batch)
            weights.append(dict(engine.state_dict()["model"]))
    assert max(worst(weights[0], other) for other in weights[1:]) <= 1e-12


def test_devices_get_fractions_of_the_cost() -> None:
    task = replace(tasks.plain(), cost=[9.0 if index % 2 else 1.0 for index in range(tasks.SAMPLES)])
    strategy, apart = DataParallel("cpu:0,cpu:1", "equal"), []
    with Engine(task, RunConfig(device="cpu", strategy=strategy, epochs=1)) as engine:
        stepper = engine.learner.stepper
        assert isinstance(stepper, DeviceReplicas)
        for batch in engine.batches():
            engine.step(batch)
            costs = stepper._unobserved[-1].costs
            assert costs is not None
            apart.append(abs(costs[0] - costs[1]) * 5)
    assert max(apart) <= 9.5
