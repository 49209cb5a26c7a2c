"""Experts divided over the ranks that divide the samples, against one device, in float64."""

from __future__ import annotations

import copy
import pickle
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

import evener
from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.distributed.environment import Environment
from evener.errors import ConfigurationError, EvenerError, TaskError
from evener.nn import Experts
from evener.tools.verify import Trajectory, record, relative_error
from evener.training.engine import Engine
from tests.comparing import handed_on, trained_by_hand, worst
from tests.tiers import NIGHTLY

WORDS, WIDTH, SAMPLES = 11, 6, 37
PADDING = -100


class Model(nn.Module):
    """Words of which each sample has another number, around a layer of experts."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mixture = Experts(WIDTH, 5, **{"experts": 5, "top": 2, **options})
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask = words >= 0
        x = self.embed(words.clamp(min=0))
        mixed = self.mixture(x, mask)
        return self.head(x + mixed.output), mixed.balance, mixed.dropped


def count(targets: Tensor) -> Tensor:
    return (targets != PADDING).sum()


def total(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    scores, balance, _ = outputs
    of_words = nn.functional.cross_entropy(
        scores.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum"
    )
    return of_words + 0.1 * balance * count(targets)


def pad(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*items, strict=True)
    return (
        pad_sequence(list(inputs), batch_first=True, padding_value=-1),
        pad_sequence(list(targets), batch_first=True, padding_value=PADDING),
    )


def task(**options: Any) -> Task:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(WORDS, (2 + n % 5,), generator=generator) for n in range(SAMPLES)]
    data = [(text[:-1], text[1:]) for text in texts]
    return Task(
        model=lambda: Model(**options),
        loss=evener.loss(total=total, count=count),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.03),
        train=data,
        evaluate=data[:11],
        collate=pad,
        batch_size=9,
        epochs=3,
        name="experts",
    )


def full() -> Task:
    """Experts that have no room for all tokens."""
    return task(capacity=0.6)


def single_choice() -> Task:
    return task(top=1, normalized=False)


def penalised() -> Task:
    """A norm of whole weights, which no rank could tell from its slices."""
    made = vars(task())
    return Task(
        **(
            made
            | {
                "penalty": lambda model: (
                    0.1 * sum((p.norm() for p in model.parameters()), start=torch.zeros(()))
                )
            }
        )
    )


def trajectory(name: str, environment: Environment | None = None, **settings: Any) -> Trajectory:
    usual = {"dtype": "float64", "device": "cpu", "steps": 6, "strategy": "experts"}
    return record(f"{__name__}:{name}", None, RunConfig(**(usual | settings)), environment)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("task", {}, marks=NIGHTLY),
        pytest.param("task", {"balance": "5,1,2", "clip_norm": 0.05}, marks=NIGHTLY),
        ("task", {"balance": "3,0,1", "micro_batch": 4}),
        ("task", {"strategy": "ddp", "balance": "3,0,1"}),
        ("full", {"balance": "1,0,3", "clip_norm": 0.1, "bucket_mb": 1e-5}),
        pytest.param("full", {"strategy": "ddp", "balance": "5,1,2"}, marks=NIGHTLY),
        ("single_choice", {"balance": "5,1,2"}),
        ("penalised", {"balance": "5,1,2", "clip_norm": 0.1}),
    ],
    ids=str,
)
def test_weights_are_those_of_one_device(ranks: Any, name: str, settings: dict[str, Any]) -> None:
    reference = trajectory(name, Environment(), **(settings | {"balance": "equal", "strategy": "single"}))
    divided = ranks(3).run(trajectory, name, **settings)
    assert worst(reference.weights, divided[0].weights) <= 1e-11
    assert all(one.losses == pytest.approx(reference.losses, rel=1e-11) for one in divided)
    assert len({one.digest for one in divided}) == 1, "replicas differ"


class Scoring(Model):
    def forward(self, words: Tensor) -> Any:
        return super().forward(words)[0].mean(1)


def scoring() -> Task:
    """Texts of one length, of which a word is told; a rank's experts have no room for all."""
    generator = torch.Generator().manual_seed(2)
    texts = torch.randint(WORDS, (SAMPLES, 4), generator=generator)
    data = TensorDataset(texts, texts[:, 0])
    changed = {"model": lambda: Scoring(capacity=0.6), "loss": nn.CrossEntropyLoss(), "collate": None}
    return Task(**(vars(task()) | changed | {"train": data, "evaluate": data}))


def held() -> tuple[dict[str, int], float, Any]:
    """Elements of each divided parameter, what the metrics are and the predictions."""
    settings = {"strategy": "experts", "device": "cpu", "dtype": "float64", "steps": 3}
    with Engine(scoring(), RunConfig(**settings)) as engine:
        for batch in engine.batches():
            engine.step(batch)
        pieces = {name: p.numel() for name, p in engine.model.named_parameters() if shard_spec(p)}
        assert copy.deepcopy(engine.model) is not engine.model
        with (
            pytest.raises(ConfigurationError, match="copied to another process") if pieces else nullcontext()
        ):
            pickle.loads(pickle.dumps(engine.model))(torch.zeros(1, 4, dtype=torch.int64))
        metrics = engine.evaluate()["loss"]
        return pieces, metrics, engine.predict(engine.task.train, everywhere=True)


def test_each_rank_holds_its_experts_and_evaluates_as_one_device(ranks: Any) -> None:
    ((pieces, loss, predicted),) = ranks(1).run(held)
    assert pieces == {}
    found = ranks(3).run(held)
    up = [of_rank["mixture.up"] for of_rank, *_ in found]
    assert up == [1 * 5 * WIDTH, 2 * 5 * WIDTH, 2 * 5 * WIDTH]
    for of_rank, metric, outputs in found:
        assert set(of_rank) == {f"mixture.{name}" for name in ("up", "up_bias", "down", "down_bias")}
        assert metric == pytest.approx(loss, rel=1e-12)
        assert relative_error(predicted, outputs) <= 1e-12


@pytest.mark.parametrize(
    "places",
    [
        (("experts", 3), ("single", 1)),
        (("single", 1), ("experts", 2)),
        pytest.param((("experts", 2), ("ddp", 3)), marks=NIGHTLY),
    ],
    ids=str,
)
def test_a_checkpoint_is_taken_into_every_other_strategy(ranks: Any, places: Any) -> None:
    reference = trajectory("full", Environment(), strategy="single", steps=5)
    found = handed_on(ranks, full, [(size, {"strategy": name}) for name, size in places], (3, 5))
    for state in found:
        assert worst(reference.weights, state["model"]) <= 1e-11


def test_a_loop_of_the_users_own(ranks: Any) -> None:
    (weights,) = ranks(1).run(trained_by_hand, task, total, count, strategy="single")
    for found in ranks(3).run(trained_by_hand, task, total, count, strategy="experts", balance="3,0,1"):
        assert worst(weights, found) <= 1e-11


def without_experts() -> Task:
    return task_of(lambda: nn.Linear(WIDTH, 3))


def two_experts() -> Task:
    return task_of(lambda: Experts(WIDTH, 4, experts=2))


def tied() -> Task:
    def model() -> nn.Module:
        layers = nn.ModuleList([Experts(WIDTH, 4, experts=4), Experts(WIDTH, 4, experts=4)])
        layers[1].up = layers[0].up
        return layers

    return task_of(model)


def whole_weights() -> Task:
    made = task()
    return Task(**(vars(made) | {"optimizer": lambda parameters: torch.optim.Adafactor(parameters)}))


def task_of(model: Any) -> Task:
    return Task(**(vars(task()) | {"model": model}))


def refused(name: str) -> tuple[type[BaseException], str]:
    with pytest.raises(EvenerError) as caught:
        trajectory(name)
    return caught.type, str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("without_experts", TaskError, "Linear has none: use strategy 'ddp'"),
        ("two_experts", ConfigurationError, "the model has 2 experts, which leave some of 3 ranks without"),
        ("tied", TaskError, "0.up and 1.up are one weight"),
    ],
)
def test_what_cannot_be_divided_is_refused(ranks: Any, name: str, kind: type, words: str) -> None:
    for found, message in ranks(3).run(refused, name):
        assert issubclass(found, kind), message
        assert re.search(words, message), message
