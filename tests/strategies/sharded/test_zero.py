"""Rows and their owners, equal and unequal, against one device, in float64."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.distributed.environment import Environment
from evener.errors import ConfigurationError, EvenerError
from evener.strategies import StrategySettings
from evener.strategies.sharded.zero import Zero
from evener.testing import check_strategy
from evener.tools.verify import Trajectory, record
from evener.training.engine import Engine
from tests import tasks
from tests.comparing import handed_on, worst
from tests.strategies.seven import normalised, penalised, plain, step_by_hand  # noqa: F401 (some by name)
from tests.tiers import NIGHTLY, SLOW, spread

WORDS, WIDTH, SAMPLES = 11, 6, 37


class Recurrent(nn.Module):
    """Tied ends, a recurrent layer, a number alone, a row alone, and steps that are computed twice."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.out = nn.Linear(WIDTH, WORDS)
        self.out.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.out.bias.decays = False
        self.reentrant = reentrant

    def scores(self, words: Tensor) -> Tensor:
        hidden, _ = self.layer(self.embed(words) + self.place)
        mixed = checkpoint(self._mixed, hidden, use_reentrant=self.reentrant)
        return self.out(mixed[:, -1] * self.frozen)

    def _mixed(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.mix(hidden)) * self.scale

    def forward(self, words: Tensor) -> Tensor:
        if not self.reentrant:
            return self.scores(words)
        return self.scores(words) + self.scores(words.flip(1))


def by_decay(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Groups by what the model says of its parameters."""
    without = [p for p in parameters if not getattr(p, "decays", True)]
    decayed = [p for p in parameters if getattr(p, "decays", True)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": without, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.03)


def task(**parts: Any) -> Task:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (SAMPLES, 5), generator=generator)
    data = TensorDataset(words, words.sum(1) % WORDS)
    usual: dict[str, Any] = {
        "model": Recurrent,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": by_decay,
        "train": data,
        "evaluate": data,
        "batch_size": 9,
        "epochs": 3,
    }
    return Task(**(usual | parts))


def recurrent() -> Task:
    return task()


def another_method() -> Task:
    """What is called is not the model's forward."""
    return task(forward=lambda model, words: model.scores(words))


def behind_its_back() -> Task:
    """An optimizer whose writes PyTorch does not count."""

    class Plain(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.data = p.data - group["lr"] * p.grad.data

    return task(optimizer=lambda parameters: Plain(parameters, lr=0.3))


class WithoutALength(nn.Linear):
    """As what ``torch.compile`` makes of a layer: it says that it has a length, and raises when it is asked."""

    def __len__(self) -> int:
        raise TypeError


def without_a_length() -> Task:
    return tasks._task(model=lambda: WithoutALength(6, 3))


def looked_up() -> Task:
    """With sparse gradients."""
    return tasks.sparse()


def trajectory(name: str, environment: Environment | None = None, **settings: Any) -> Trajectory:
    usual = {"dtype": "float64", "device": "cpu", "steps": 6, "strategy": Zero()}
    return record(f"{__name__}:{name}", None, RunConfig(**(usual | settings)), environment)


def compared(ranks: Any, size: int, name: str, settings: dict[str, Any]) -> None:
    alike = {"balance": "equal", "strategy": "single", "mesh": None, "compress": None, "allreduce": None}
    reference = trajectory(name, Environment(), **(settings | alike))
    divided = ranks(size).run(trajectory, name, **settings)
    assert worst(reference.weights, divided[0].weights) <= 1e-11
    assert all(one.losses == pytest.approx(reference.losses, rel=1e-11) for one in divided)
    assert len({one.digest for one in divided}) == 1, "replicas differ"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("recurrent", {"balance": "5,1,2", "clip_norm": 0.05, "bucket_mb": 1e-5}),
        pytest.param(
            "recurrent",
            {"strategy": Zero(shard_sizes="3,1,1"), "balance": "3,0,1", "micro_batch": 4},
            marks=NIGHTLY,
        ),
        pytest.param(
            *(
                "recurrent",
                {"strategy": Zero(stage=1, shard_sizes="1,0,2"), "micro_batch": 4, "bucket_mb": 1e-3},
            ),
            marks=NIGHTLY,
        ),
        pytest.param(
            "recurrent", {"allreduce": "native", "bucket_mb": 1e-4, "micro_batch": 5}, marks=NIGHTLY
        ),
        ("recurrent", {"strategy": Zero(stage=1), "allreduce": "ring"}),
        ("another_method", {"balance": "5,1,2"}),
        ("looked_up", {"balance": "5,1,2"}),
        ("without_a_length", {}),
        ("behind_its_back", {"balance": "5,1,2"}),
        ("penalised", {"strategy": Zero(shard_sizes="1,0,2"), "balance": "5,1,2", "clip_norm": 0.2}),
        ("recurrent", {"strategy": Zero(in_common=True), "balance": "5,1,2", "bucket_mb": 1e-3}),
        pytest.param(
            *("behind_its_back", {"strategy": Zero(1, "3,1,0", in_common=True), "micro_batch": 4}),
            marks=NIGHTLY,
        ),
        pytest.param(
            *(
                "penalised",
                {"strategy": Zero(2, "1,0,2", in_common=True), "balance": "5,0,2", "clip_norm": 0.2},
            ),
            marks=NIGHTLY,
        ),
    ],
    ids=str,
)
def test_weights_are_those_of_one_device(ranks: Any, name: str, settings: dict[str, Any]) -> None:
    compared(ranks, 3, name, settings)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(
            "recurrent",
            {"strategy": Zero(shard_sizes="2,1"), "mesh": "data=2,shard=2", "balance": "4,1,0,2"},
            marks=NIGHTLY,
        ),
        ("recurrent", {"strategy": Zero(in_common=True), "mesh": "data=2,shard=2", "balance": "4,1,0,2"}),
        pytest.param(
            "recurrent",
            {"strategy": Zero(stage=1), "mesh": "data=2,shard=2", "micro_batch": 4, "clip_norm": 0.05},
            marks=NIGHTLY,
        ),
    ],
    ids=str,
)
def test_rows_are_divided_over_one_axis_of_a_mesh(ranks: Any, name: str, settings: dict[str, Any]) -> None:
    compared(ranks, 4, name, settings)


@pytest.mark.parametrize(
    ("size", "strategy"),
    spread(
        [
            (2, Zero(shard_sizes="3,1")),
            *((size, strategy) for size in (2, 3) for strategy in (Zero(), Zero(stage=1, shard_sizes="2,1"))),
            (3, Zero(shard_sizes="3,1")),
        ],
        SLOW,
        *[NIGHTLY] * 5,
    ),
    ids=str,
)
def test_the_promises_are_kept(ranks: Any, strategy: Zero, size: int) -> None:
    shard_sizes = strategy.shard_sizes and f"{strategy.shard_sizes}{',0' * (size - 2)}"
    ranks(size).run(check_strategy, Zero(strategy.stage, shard_sizes))


@pytest.mark.nightly
def test_the_promises_are_kept_by_unequal_owners(ranks: Any) -> None:
    ranks(3).run(check_strategy, Zero(shard_sizes="3,1,0"))


@pytest.mark.parametrize("strategy", spread([Zero(stage=1), Zero(shard_sizes="2,1")], SLOW, NIGHTLY), ids=str)
def test_the_promises_are_kept_on_a_mesh(ranks: Any, strategy: Zero) -> None:
    ranks(4).run(check_strategy, strategy, mesh="data=2,shard=2")


def shares(throttle: str) -> list[tuple[int, ...]]:
    """Of each step, until they are unequal: how soon that is depends on what else the machine does."""
    config = RunConfig(
        strategy=Zero(shard_sizes="1,3"),
        device="cpu",
        steps=400,
        epochs=200,
        balance="auto",
        throttle=throttle,
    )
    found: list[tuple[int, ...]] = []
    with Engine(plain(), config) as engine:
        for batch in engine.batches():
            engine.step(batch)
            found.append(batch.shares)
            if batch.shares[0] > batch.shares[1] + 3:
                break
    return found


def test_samples_go_by_speed_and_not_by_rows(ranks: Any) -> None:
    found = ranks(2).run(shares, "1,0.1")[0]
    assert abs(found[0][0] - found[0][1]) <= 1
    assert found[-1][0] > found[-1][1] + 3


# Memory


# Checkpoints


ONE: dict[str, Any] = {"strategy": "single"}


@pytest.mark.parametrize(
    "places",
    [
        pytest.param((({"strategy": Zero(shard_sizes="2,1")}, 2), (ONE, 1)), marks=pytest.mark.slow),
        pytest.param(
            ((ONE, 1), ({"strategy": Zero(stage=1, shard_sizes="1,5,0")}, 3)), marks=pytest.mark.slow
        ),
        (({"strategy": Zero(shard_sizes="3,1")}, 2), ({"strategy": Zero(shard_sizes="1,2,2")}, 3)),
        (({"strategy": Zero(shard_sizes="1,0,4")}, 3), ({"strategy": "ddp"}, 2)),
        pytest.param(
            (({"strategy": "ddp"}, 3), ({"strategy": Zero(shard_sizes="1,3"), "mesh": "data=2,shard=2"}, 4)),
            marks=NIGHTLY,
        ),
    ],
    ids=str,
)
def test_a_checkpoint_is_taken_into_every_other_division(ranks: Any, places: Any) -> None:
    reference = trajectory("recurrent", Environment(), strategy="single", steps=5)
    found = handed_on(ranks, recurrent, [(size, settings) for settings, size in places], (3, 5))
    for state in found:
        assert worst(reference.weights, state["model"]) <= 1e-11


# A loop of the user's own


# What is refused


def reentrant() -> Task:
    return task(model=lambda: Recurrent(reentrant=True))


def hooked() -> Task:
    def model() -> nn.Module:
        built = Recurrent()
        built.mix.weight.register_hook(lambda gradient: gradient * 2)
        return built

    return task(model=model)


def accumulating() -> Task:
    def model() -> nn.Module:
        built = Recurrent()
        built.mix.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        return built

    return task(model=model)


def refused(name: str, settings: dict[str, Any]) -> tuple[type[BaseException], str]:
    with pytest.raises(EvenerError) as caught:
        trajectory(name, **settings)
    return caught.type, str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("reentrant", {}, "the gradient of .* came twice in one backward, .*use_reentrant=False"),
        ("hooked", {}, "the model registers a hook on the gradient of mix.weight"),
        ("accumulating", {}, "the model registers a hook on the gradient of mix.weight"),
        ("hooked", {"strategy": "sharded"}, "the model registers a hook on the gradient of mix.weight"),
        ("recurrent", {"compress": "fp16"}, "strategy 'sharded' with zero=2 cannot compress with 'fp16'"),
        ("recurrent", {"allreduce": "ring"}, "all-reduce 'ring' brings the sum to all ranks; to the owners"),
        ("recurrent", {"strategy": Zero(shard_sizes="1,2,3")}, "3 weights .* for 2 ranks"),
    ],
)
def test_what_cannot_be_is_refused(ranks: Any, name: str, settings: dict[str, Any], words: str) -> None:
    for kind, message in ranks(2).run(refused, name, settings):
        assert issubclass(kind, ConfigurationError), message
        assert re.search(words, message), message


def hooked_in_mid_run(stage: str) -> str:
    settings: dict[str, Any] = {"strategy": "sharded", "strategy_option": (f"zero={stage}",), "device": "cpu"}
    with Engine(tasks.plain(), steps=3, **settings) as engine:
        batches = engine.batches()
        engine.step(next(batches))
        next(engine.model.parameters()).register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        with pytest.raises(ConfigurationError) as caught:
            engine.step(next(batches))
    return str(caught.value)


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_a_hook_that_comes_in_mid_run_is_refused(ranks: Any, stage: str) -> None:
    for message in ranks(2).run(hooked_in_mid_run, stage):
        assert "weight has a hook on its gradient, of which each rank has a part" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 3}, "there is no stage 3"),
        ({"shard_sizes": "2,much"}, "shard_sizes='2,much' .* write one number for each rank"),
        ({"shard_sizes": "0,0"}, "some rank must have work"),
        ({"shard_sizes": "1,-1"}, "the weight of rank 1 is -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Zero(**options)


def test_powersgd_is_of_ddp_alone() -> None:
    with pytest.raises(
        ConfigurationError, match="strategy 'sharded' with zero=1 cannot compress with 'powersgd'"
    ):
        Zero(stage=1).layout(2, StrategySettings(compression="powersgd"))
    assert Zero(stage=1).layout(2, StrategySettings(compression="fp16")).degree("shard") == 2


def compressed() -> list[float]:
    config = RunConfig(strategy=Zero(stage=1), device="cpu", steps=5, compress="bf16")
    with Engine(recurrent(), config) as engine:
        return [engine.step(batch).loss for batch in engine.batches()]


def test_the_first_stage_may_compress(ranks: Any) -> None:
    losses = ranks(2).run(compressed)
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(
        trajectory("recurrent", Environment(), strategy="single", steps=5).losses, rel=0.05
    )
