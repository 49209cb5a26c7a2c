"""Samples divided over one axis and features over another, against one device, in float64, on four ranks."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from evener.core.config.run_config import RunConfig
from evener.core.observer import Observer
from evener.core.records import RunStart, StepRecord
from evener.core.task.task import Task
from evener.distributed.environment import Environment
from evener.errors import ConfigurationError, DivergenceError, EvenerError, RankError, ShareError
from evener.hardware.async_read import ReadyValue
from evener.testing import check_strategy
from evener.tools.conformance.tasks import broken
from evener.tools.verify import Trajectory, relative_error
from evener.tools.verify import record as record_steps
from evener.training.engine import Engine
from evener.training.factory import check_division
from evener.training.reporting.ranks import RecentSteps
from evener.training.reporting.terminal import summary_text
from tests.comparing import handed_on, worst
from tests.distributed.processes import call
from tests.strategies.seven import (  # noqa: F401 (some as tasks of this module, by name)
    FEATURES,
    SAMPLES,
    data,
    deep,
    normalised,
    penalised,
    plain,
    step_by_hand,
    task,
)
from tests.tiers import ALWAYS, NIGHTLY, SLOW, crossed, spread

TWO_AXES = "tests.strategies.two_axes:TwoAxes"


class Skipping(nn.Module):
    """Samples choose a layer; one is chosen by few of them, one by none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        rows = [self.heads[int(score > 0.6)](row) for row, score in zip(hidden, hidden[:, 0], strict=True)]
        return torch.stack(rows)


def skipping() -> Task:
    return task(Skipping, batch_size=3)


def trajectory(name: str, environment: Environment | None = None, **settings: Any) -> Trajectory:
    usual = {"dtype": "float64", "device": "cpu", "steps": 5, "strategy": TWO_AXES}
    return record_steps(f"{__name__}:{name}", None, RunConfig(**(usual | settings)), environment)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("plain", {}, marks=NIGHTLY),
        pytest.param("plain", {"balance": "3,1", "micro_batch": 4}, marks=NIGHTLY),
        pytest.param("plain", {"balance": "3,1", "clip_norm": 0.05, "bucket_mb": 1e-5}, marks=NIGHTLY),
        ("plain", {"balance": "0,1", "allreduce": "native"}),
        pytest.param("normalised", {"balance": "3,1"}, marks=NIGHTLY),
        ("normalised", {"balance": "3,1", "micro_batch": 5, "clip_norm": 0.2}),
        ("penalised", {"balance": "3,1", "clip_norm": 0.2}),
        pytest.param("skipping", {}, marks=NIGHTLY),
        ("skipping", {"balance": "3,1", "micro_batch": 2, "steps": 9}),
    ],
    ids=str,
)
def test_weights_are_those_of_one_device(ranks: Any, name: str, settings: dict[str, Any]) -> None:
    reference = trajectory(name, Environment(), **(settings | {"balance": "equal", "strategy": "single"}))
    divided = ranks(4).run(trajectory, name, **settings)
    assert worst(reference.weights, divided[0].weights) <= 1e-11
    assert all(one.losses == pytest.approx(reference.losses, rel=1e-11) for one in divided)
    assert len({one.digest for one in divided}) == 1, "replicas differ"


class Kept(Observer):
    everywhere = True

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def start(self, run: RunStart) -> None:
        self.parts = run.parts

    def step(self, record: StepRecord) -> None:
        self.records.append(record)


def taken(seconds: float = 0.0, **settings: Any) -> list[StepRecord]:
    """The records of a run, as every rank was told them.

    Args:
        seconds: What a sample takes at full speed, as far as the engine is told; 0 as measured.
    """
    kept = Kept()
    config = RunConfig(strategy=TWO_AXES, device="cpu", **settings)
    with Engine(plain(), config, observers=[kept]) as engine:
        for batch in engine.batches():
            own = batch.shares[engine.learner.data.index]
            assert batch.micro_batches[0].size == own
            throttle = engine.learner.settings.throttle
            if seconds and throttle:
                took = ReadyValue(seconds * own / throttle.factors[engine.session.rank])
                engine.learner.work_timer.taken = lambda took=took: took  # type: ignore[method-assign,misc]
            engine.step(batch)
    return kept.records


def test_records_tell_the_time_of_every_rank_and_the_share_of_every_part(ranks: Any) -> None:
    found = ranks(4).run(taken, steps=3, balance="3,1")
    assert all([record.loss for record in records] == [r.loss for r in found[0]] for records in found)
    for record in found[2]:
        assert record.shares == (10, 3)
        assert len(record.compute_seconds) == len(record.wait_seconds) == len(record.input_seconds) == 4
        assert all(math.isfinite(seconds) and seconds > 0 for seconds in record.compute_seconds)


@pytest.mark.parametrize("throttle", ["1,0.1", "1,1,0.1,1"], ids=["by part", "by rank"])
def test_the_balancer_goes_by_the_slowest_of_a_team(ranks: Any, throttle: str) -> None:
    records = ranks(4).run(taken, 0.001, steps=39, epochs=10, balance="auto", throttle=throttle)[3]
    first, last = records[0].shares, records[-1].shares
    assert first == (7, 6)
    assert last[0] > last[1] + 3, "part 1, in which a rank is slow, has less"


def test_max_shares_are_those_of_the_parts(ranks: Any) -> None:
    for records in ranks(4).run(taken, steps=2, balance="1,1", max_shares="4,-"):
        assert [record.shares for record in records] == [(4, 9), (4, 9)]


def refused(kind: type[EvenerError], name: str = "plain", **settings: Any) -> str:
    with pytest.raises(kind) as caught:
        trajectory(name, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"balance": "1,1,1,1"}, r"4 weights .* for 2"),
        ({"max_shares": "4,4,4,4"}, "4 .*2"),
        ({"throttle": "1,1,1"}, "3 factors for 4 ranks"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_parts_is_refused(ranks: Any, settings: dict[str, Any], words: str) -> None:
    for message in ranks(4).run(refused, EvenerError, **settings):
        assert re.search(words, message), message


def evaluated(strategy: str = TWO_AXES) -> tuple[dict[str, float], Any, Any]:
    with Engine(plain(), RunConfig(strategy=strategy, device="cpu", dtype="float64", steps=3)) as engine:
        for batch in engine.batches():
            engine.step(batch)
        odd = TensorDataset(*(tensor[:5] for tensor in data().tensors))
        return engine.evaluate(), engine.predict(odd), engine.predict(data(), everywhere=True)


def test_evaluation_and_predictions(ranks: Any) -> None:
    metrics, few, every = ranks(1).run(evaluated, "single")[0]
    for rank, found in enumerate(ranks(4).run(evaluated)):
        assert found[0] == pytest.approx(metrics, rel=1e-12)
        assert (found[1] is None) == (rank > 0)
        assert relative_error(every, found[2]) <= 1e-12
        assert found[1] is None or relative_error(few, found[1]) <= 1e-12


@pytest.mark.parametrize(
    ("places", "name"),
    crossed(
        [(4, 1), (1, 4), (4, 2), (2, 4)],
        ["plain", "normalised"],
        lambda places: (SLOW if 2 in places else ALWAYS, NIGHTLY),
    ),
)
def test_any_ranks_go_on_from_a_checkpoint_of_any(ranks: Any, name: str, places: tuple[int, int]) -> None:
    reference = trajectory(name, Environment(), strategy="single", steps=5)
    strategies = {1: "single", 2: "ddp", 4: TWO_AXES}
    where = [(size, {"strategy": strategies[size]}) for size in places]
    found = handed_on(ranks, globals()[name], where, (3, 5))
    for state in found:
        weights = {key: value for key, value in reference.weights.items() if key in state["model"]}
        assert worst(weights, state["model"]) <= 1e-11


def failing(rank: int, fault: str, by_hand: bool = False) -> str:
    """In the last step, after which no rank waits for one that is gone."""
    config = RunConfig(strategy=TWO_AXES, device="cpu", dtype="float64", steps=4, timeout_seconds=60)
    try:
        with Engine(broken(fault, rank), config) as engine:
            for batch in engine.batches():
                step_by_hand(engine, batch) if by_hand else engine.step(batch)
    except DivergenceError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("where", "rank"),
    crossed(
        [f"{fault}, {loop}" for fault in ("loss", "gradient") for loop in ("step", "by hand")],
        [0, 2, 3],
        lambda _: (ALWAYS, NIGHTLY, NIGHTLY),
    ),
)
def test_an_error_names_the_rank_where_it_is(ranks: Any, rank: int, where: str) -> None:
    fault, loop = where.split(", ")
    messages = ranks(4).run(failing, rank, fault, loop == "by hand")
    what = "the loss is nan" if fault == "loss" else "a gradient is not finite"
    for message in messages:
        assert what in message
        assert re.search(rf"on rank {rank}([:,] that of layers\.2\.bias)?; the run stops here", message)
        assert (fault == "gradient") == ("that of" in message)


class Raising(nn.Module):
    """On rank 2 of the world, in the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.passes = deep(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        if self.passes == 3 and torch.distributed.get_rank() == 2:
            raise ValueError("this layer has no luck")
        scores: Tensor = self.model(x)
        return scores


def raising() -> Task:
    return task(Raising)


def diverging() -> Task:
    """In the middle of the run: the others wait for rank 2, and are ended."""
    return broken("loss", 2)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    spread(
        [
            ("raising", RankError, "rank 2.*this layer has no luck"),
            ("diverging", DivergenceError, "the loss is nan in step 3 on rank 2;"),
        ],
        SLOW,
        NIGHTLY,
    ),
)
def test_what_ends_a_run_names_the_rank_of_the_world(name: str, kind: type[EvenerError], words: str) -> None:
    settings: dict[str, Any] = {"strategy": TWO_AXES, "processes": 4, "device": "cpu", "timeout_seconds": 60}
    with pytest.raises(kind, match=f"(?s){words}"):
        call(evener.fit, f"{__name__}:{name}", show=False, **settings)


def another_length() -> Task:
    length = SAMPLES - (torch.distributed.get_rank() == 2)
    return task(train=TensorDataset(*(tensor[:length] for tensor in data().tensors)))


def test_a_rank_with_other_data_is_named(ranks: Any) -> None:
    for message in ranks(4).run(refused, ConfigurationError, "another_length"):
        assert "length of the training set is 41 on ranks 0, 1, 3, 40 on rank 2" in message


def by_hand(strategy: str, **settings: Any) -> tuple[list[float], dict[str, Tensor]]:
    config = RunConfig(strategy=strategy, device="cpu", dtype="float64", epochs=1, clip_norm=0.1, **settings)
    with Engine(penalised(), config) as engine:
        losses = [step_by_hand(engine, batch) for batch in engine.batches()]
        return losses, {name: value.detach().clone() for name, value in engine.learner.tensors().items()}


def test_a_loop_of_the_users_own(ranks: Any) -> None:
    losses, weights = ranks(1).run(by_hand, "single")[0]
    for found in ranks(4).run(by_hand, TWO_AXES, balance="3,1"):
        assert found[0] == pytest.approx(losses, rel=1e-11)
        assert worst(weights, found[1]) <= 1e-11


def fitted(run_dir: str) -> Any:
    kept = Kept()
    settings = {"strategy": TWO_AXES, "device": "cpu", "balance": "3,1", "run_dir": run_dir, "epochs": 1}
    summary = evener.fit(plain(), show=False, observers=[kept], **settings).summary
    recent = RecentSteps(kept.parts)
    for record in kept.records:
        recent.add(record)
    return summary, recent.each()


@pytest.mark.slow
def test_the_battery_of_strategies(ranks: Any) -> None:
    ranks(4).run(check_strategy, TWO_AXES, without=("tokens", "sparse"))


def test_a_whole_run_and_what_it_tells(ranks: Any, tmp_path: Path) -> None:
    for summary, line in ranks(4).run(fitted, str(tmp_path / "run")):
        assert summary.strategy == "two-axes"
        assert summary.world_size == 4
        assert summary.samples == SAMPLES
        assert summary.shares == pytest.approx([32 / 41, 32 / 41, 9 / 41, 9 / 41])
        text = summary_text(summary)
        # Others tell of a busy machine.
        rows = [row for row in text.splitlines() if re.match(r" +\d +[\d.]+%", row)]
        assert [re.findall(r"[\d.]+%", row) for row in rows] == [
            ["78.0%"],
            ["78.0%"],
            ["22.0%"],
            ["22.0%"],
        ]
        assert re.findall(r"(\d): (\d+)%", line) == [("0", "78"), ("1", "78"), ("2", "22"), ("3", "22")]


def test_shares_of_another_number_are_found_before_ranks_start() -> None:
    with pytest.raises(ShareError, match=r"4 weights .* for 2"):
        check_division(RunConfig(strategy=TWO_AXES, balance="1,1,1,1"), 4)
    check_division(RunConfig(strategy=TWO_AXES, balance="3,1", max_shares="9,9", throttle="1,0.5"), 4)
