"""The features divided over ranks, against one device that has them all, in float64."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import evener
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.distributed.environment import Environment
from evener.errors import ConfigurationError, EvenerError, TaskError
from evener.tools.verify import Trajectory, record, relative_error
from evener.training.engine import Engine
from tests.comparing import worst
from tests.strategies.seven import (  # noqa: F401 (some as tasks of this module, by name)
    FEATURES,
    SAMPLES,
    deep,
    normalised,
    penalised,
    plain,
    step_by_hand,
    task,
)
from tests.tasks import classes, draws
from tests.tiers import ALWAYS, NIGHTLY, crossed


def plain_dropout() -> Task:
    """All ranks compute the same samples, and so must draw the same."""
    return task(lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.4), nn.Linear(8, 3)))


class WideAndDeep(nn.Module):
    """Two layers that read the features, which are one of two inputs and of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3, sparse=True)
        self.deep = evener.nn.FeatureParallelLinear(FEATURES, 5)
        self.mix = nn.Linear(5, 3)
        self.wide = evener.nn.FeatureParallelLinear(FEATURES, 3, bias=False)

    def forward(self, features: Tensor, kind: Tensor) -> Tensor:
        hidden = torch.tanh(self.deep(features)) + self.deep(features)
        scores: Tensor = (self.mix(hidden) + self.wide(features)).sum(1) + self.embedding(kind)
        return scores


class WideData(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        item = {"features": draws(2, FEATURES, seed=index), "kind": torch.tensor(index % 4)}
        return item, torch.tensor(index % 3)


def wide_and_deep() -> Task:
    return task(
        WideAndDeep,
        train=WideData(),
        evaluate=WideData(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )


class ByColumns(Dataset[Any]):
    """Reads no more than the columns it was asked for."""

    def __init__(self, start: int = 0, stop: int = FEATURES) -> None:
        self.start, self.stop = start, stop
        self.asked = 0
        self.values = draws(SAMPLES, FEATURES).numpy()

    def columns(self, start: int, stop: int) -> ByColumns:
        self.asked += 1
        return ByColumns(start, stop)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return np.ascontiguousarray(self.values[index, self.start : self.stop]), index % 3


def by_columns() -> Task:
    return task(deep, train=ByColumns(), evaluate=ByColumns())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from zip(draws(SAMPLES, FEATURES), classes(SAMPLES, 3), strict=True)


def stream() -> Task:
    return task(deep, train=Stream(), evaluate=None)


def trajectory(name: str, environment: Environment | None = None, **settings: Any) -> Trajectory:
    usual = {"dtype": "float64", "device": "cpu", "steps": 5, "strategy": "dimension"}
    config = RunConfig(**(usual | settings))
    return record(f"{__name__}:{name}", None, config, environment)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("plain", {}, marks=NIGHTLY),
        ("plain", {"micro_batch": 4, "clip_norm": 0.05, "bucket_mb": 1e-5}),
        ("plain", {"balance": "1,4,2", "allreduce": "native"}),
        pytest.param("normalised", {}, marks=NIGHTLY),
        ("normalised", {"micro_batch": 5}),
        ("plain_dropout", {}),
        ("penalised", {"clip_norm": 0.2}),
        ("wide_and_deep", {"clip_norm": 0.3}),
        ("by_columns", {}),
        ("stream", {}),
    ],
    ids=str,
)
def test_weights_are_those_of_one_device(ranks: Any, name: str, settings: dict[str, Any]) -> None:
    reference = trajectory(name, Environment(), **(settings | {"balance": "equal", "strategy": "single"}))
    divided = ranks(3).run(trajectory, name, **settings)
    assert worst(reference.weights, divided[0].weights) <= 1e-12
    assert divided[0].losses == pytest.approx(reference.losses, rel=1e-12)
    assert len({one.digest for one in divided}) == 1, "replicas differ"


def held(name: str, **settings: Any) -> tuple[dict[str, Any], list[int]]:
    """The shapes of what a rank holds, and how many samples it computed in each step."""
    with Engine(
        globals()[name](), RunConfig(strategy="dimension", steps=3, device="cpu", **settings)
    ) as engine:
        shapes = {key: tuple(value.shape) for key, value in engine.model.state_dict().items()}
        sizes = []
        for batch in engine.batches():
            sizes.append(batch.micro_batches[0].size)
            engine.step(batch)
        return shapes, sizes


def test_each_rank_holds_its_slice_and_computes_every_sample(ranks: Any) -> None:
    found = ranks(3).run(held, "plain", balance="1,4,2")
    assert [shapes["0.weight"] for shapes, _ in found] == [(8, 1), (8, 4), (8, 2)]
    assert all(shapes["2.weight"] == (FEATURES, 8) for shapes, _ in found)
    assert all(sizes == [13, 13, 13] for _, sizes in found)


def stop_and_go(state: dict[str, Any] | None, steps: int, name: str, **settings: Any) -> dict[str, Any]:
    config = RunConfig(
        **({"strategy": "dimension", "device": "cpu", "dtype": "float64"} | settings), steps=steps
    )
    with Engine(globals()[name](), config) as engine:
        if state is not None:
            engine.load_state_dict(state)
        for batch in engine.batches():
            engine.step(batch)
        return engine.state_dict()


@pytest.mark.parametrize(
    ("places", "name"),
    crossed([(3, 2), (3, 1), (1, 3)], ["plain", "normalised"], lambda _: (ALWAYS, NIGHTLY)),
)
def test_any_number_of_ranks_goes_on_from_the_state_of_any(
    ranks: Any, name: str, places: tuple[int, int]
) -> None:
    """Weights and what the optimizer keeps of them are whole; two or three ranks divide the features, one does not."""
    first, then = places
    half = ranks(first).run(stop_and_go, None, 4, name)[0]
    assert half["model"]["0.weight"].shape == (8, FEATURES)
    gone_on = ranks(then).run(stop_and_go, half, 7, name)[0]
    reference = ranks(1).run(stop_and_go, None, 7, name, strategy="single")[0]
    assert worst(reference["model"], gone_on["model"]) <= 1e-12
    for index, kept in reference["optimizer"]["state"].items():
        assert worst(_tensors(kept), _tensors(gone_on["optimizer"]["state"][index])) <= 1e-11


def _tensors(kept: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value).double() for name, value in kept.items() if value is not None}


def by_hand(**settings: Any) -> tuple[list[float], dict[str, float], Tensor, dict[str, Tensor]]:
    """A loop of the user's own with an evaluation and predictions at its end."""
    config = RunConfig(
        **({"strategy": "dimension", "device": "cpu", "dtype": "float64", "epochs": 1} | settings)
    )
    with Engine(plain(), config, clip_norm=0.1) as engine:
        losses = [step_by_hand(engine, batch) for batch in engine.batches()]
        outputs = engine.predict(plain().train, everywhere=True)
        weights = {name: value.detach().clone() for name, value in engine.learner.tensors().items()}
        return losses, engine.evaluate(), outputs, weights


def test_a_loop_of_the_users_own_with_evaluation_and_predictions(ranks: Any) -> None:
    losses, metrics, outputs, weights = ranks(1).run(by_hand, strategy="single")[0]
    assert len(outputs) == SAMPLES
    for found in ranks(3).run(by_hand):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1] == pytest.approx(metrics, rel=1e-12)
        assert relative_error(outputs, found[2]) <= 1e-12
        assert worst(weights, found[3]) <= 1e-12


def fitted(name: str) -> tuple[list[float], list[tuple[int, ...]], Any, int]:
    """A whole run that evaluates twice."""
    task = globals()[name]()
    trained = evener.fit(task, strategy="dimension", device="cpu", show=False)
    return (
        trained.summary.shares,
        [tuple(value.shape) for value in trained.weights.values()],
        (trained.summary.samples, trained.summary.weights_digest, trained.summary.metrics),
        task.evaluate.asked,
    )


def test_a_whole_run_tells_that_every_rank_had_all_samples(ranks: Any) -> None:
    found = ranks(2).run(fitted, "by_columns")
    for shares, shapes, told, asked in found:
        assert shares == [1.0, 1.0]
        assert shapes[0] == (8, FEATURES)
        assert told[0] == 2 * SAMPLES
        assert told == found[0][2]
        assert asked == 1


class Drifting(nn.Linear):
    """Rounds differently on each rank, as devices of two kinds do."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (1 + 1e-13 * torch.distributed.get_rank())


def drifting() -> Task:
    layers = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(FEATURES, 8), nn.Tanh(), Drifting(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    )
    return task(layers)


def test_replicas_stay_equal_on_devices_that_round_differently(ranks: Any) -> None:
    assert len({one.digest for one in ranks(3).run(trajectory, "drifting")}) == 1


def too_narrow() -> Task:
    data = TensorDataset(draws(SAMPLES, 2), classes(SAMPLES, 3))
    return task(lambda: nn.Linear(2, 3), train=data)


def no_linear() -> Task:
    return task(lambda: nn.Conv1d(1, 1, 1))


def another_width() -> Task:
    return task(lambda: nn.Sequential(nn.Linear(5, 3)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.decode.weight = self.encode.weight


def tied() -> Task:
    return task(Tied)


def two_widths() -> Task:
    linear = evener.nn.FeatureParallelLinear
    return task(lambda: nn.ModuleList([linear(4, 2), linear(5, 2)]))


def own_parts() -> Task:
    return task(deep, partition="sample")


def whole_weights() -> Task:
    return task(deep, optimizer=lambda p: torch.optim.Adafactor(p))


class Before(nn.Module):
    """Looks at the features before the layer that is divided."""

    def __init__(self, before: Any) -> None:
        super().__init__()
        self.before, self.first, self.last = before, nn.Linear(FEATURES, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.first(self.before(x))))
        return found


class InTraining(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True) if self.training else x


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * x.sum(1, keepdim=True)


class Normal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x)


def normal() -> Task:
    return task(lambda: Before(Normal()))


def in_training() -> Task:
    return task(lambda: Before(InTraining()))


def gate_of_zero() -> Task:
    return task(lambda: Before(Gated()))


def batch_norm_before() -> Task:
    return task(lambda: Before(nn.BatchNorm1d(FEATURES)))


def dropout_before() -> Task:
    return task(lambda: Before(evener.nn.Dropout(0.5)))


def columns_together() -> Task:
    return task(lambda: Before(Normal()), train=ByColumns())


def parametrized() -> Task:
    return task(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 3)))


class Sampled(nn.Module):
    """Its penalty of what lies between the divided layer and the next is of another number on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(x))
        return found * (1 + torch.distributed.get_rank() / 100)


def of_the_rank() -> Task:
    return task(Sampled)


def refused(name: str, **settings: Any) -> tuple[type, str]:
    with pytest.raises(EvenerError) as caught:
        trajectory(name, **settings)
    return caught.type, str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings", "kind", "words"),
    [
        (
            "too_narrow",
            {},
            ConfigurationError,
            "2 features .* leave rank 2 of 3 without one; use at most 2 ranks",
        ),
        ("plain", {"balance": "1,0,1"}, ConfigurationError, "leave rank 1 of 3 without one"),
        ("no_linear", {}, TaskError, "Conv1d has none"),
        ("another_width", {}, EvenerError, r"\(7,\) or \(41, 7\)|has the 5 features of the divided layer"),
        ("tied", {}, TaskError, "encode.weight and decode.weight are one weight"),
        ("two_widths", {}, TaskError, "different numbers of features, {'0': 4, '1': 5}"),
        ("normal", {}, TaskError, "from all 7 features .outputs differs by .* in evaluation mode"),
        ("in_training", {}, TaskError, "from all 7 features .outputs differs by .* in training mode"),
        ("gate_of_zero", {}, TaskError, "from all 7 features"),
        ("columns_together", {}, TaskError, "from all 7 features"),
        (
            "batch_norm_before",
            {},
            TaskError,
            "cannot run where first reads some of the 7 features: RuntimeError",
        ),
        ("dropout_before", {}, TaskError, "the dropout before gets some of the features"),
        ("parametrized", {}, TaskError, "is computed from other parameters"),
        (
            "of_the_rank",
            {},
            TaskError,
            "the losses of the first step add up to between .* that compute the same samples",
        ),
        ("own_parts", {}, ConfigurationError, "'dimension' gives several ranks the same samples"),
        ("plain", {"compress": "bf16"}, ConfigurationError, "no gradients that 'bf16' could compress"),
    ],
    ids=str,
)
def test_what_cannot_be_divided_is_refused_on_every_rank(
    ranks: Any, name: str, settings: dict[str, Any], kind: type, words: str
) -> None:
    for found, message in ranks(3).run(refused, name, **settings):
        assert issubclass(found, kind)
        assert re.search(words, message), message
