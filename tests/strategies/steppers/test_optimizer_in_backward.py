"""Updates in backward: the same numbers, less memory, and in words what cannot be so."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import evener
from evener.components.optim.elementwise import SAYS_ALONE
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.distributed.session import Session
from evener.errors import CheckpointError, ConfigurationError, TaskError
from evener.strategies.steppers.optimizer_in_backward import OneByOne, check_optimizer
from evener.tools.estimate.measure import measure_memory
from evener.tools.verify import verify
from evener.training.engine import Engine
from tests import tasks
from tests.strategies import eight
from tests.tiers import ALWAYS, NIGHTLY, spread

EARLY = {"update_in_backward": True}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw foreach": partial(torch.optim.AdamW, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
}


def engine(task: Task, **settings: Any) -> Engine:
    return Engine(task, RunConfig(**({"device": "cpu", "dtype": "float64"} | settings)))


def deep(optimizer: Any = torch.optim.SGD) -> Task:
    """Gradients are most of what it holds."""
    layers = lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)), nn.Linear(64, 10))  # noqa: E731
    blocks = lambda: nn.Sequential(nn.Sequential(nn.Flatten(), layers()), nn.Sequential(nn.Identity()))  # noqa: E731
    return replace(eight.task(), model=blocks, optimizer=lambda p: optimizer(p, lr=1e-2))


def trained(task: Task, **settings: Any) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, weights at the end, and how many parameters were updated in the last backward pass."""
    with engine(task, **settings) as each:
        losses = [each.step(batch).loss for batch in each.batches()]
        weights = {name: value.detach().clone() for name, value in each.learner.tensors().items()}
        return losses, weights, len(each.learner.updated_early)


def assert_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name


# The same numbers


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_device_comes_to_the_same_bits(kind: str) -> None:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        return OPTIMIZERS[kind]([{"params": [first], "weight_decay": 0.1}, {"params": others}])

    task = replace(eight.task(), optimizer=OPTIMIZERS[kind] if kind == "rprop" else groups)
    early = trained(task, **EARLY)
    assert early[2] == 6
    assert_same(early, trained(task))


@pytest.mark.parametrize("name", ["batch_norm", "tokens", "sparse", "branches"])
def test_models_of_every_kind_do(name: str) -> None:
    """Embeddings with sparse gradients, layers that no sample used, BatchNorm, a scheduler."""
    task = getattr(tasks, name)
    assert_same(trained(task(), **EARLY), trained(task()))


def _on_ranks(name: str, options: tuple[str, ...], early: bool, more: dict[str, Any]) -> tuple[Any, ...]:
    settings = {"strategy": "sharded", "strategy_option": options, "update_in_backward": early, **more}
    own = {"wide": eight.task, "deep": eight_deep}
    return trained(own[name]() if name in own else getattr(tasks, name)(), **settings)


@pytest.mark.parametrize("name", spread(["wide", "branches", "batch_norm"], ALWAYS, ALWAYS, NIGHTLY))
def test_sharded_ranks_come_to_the_same_bits(ranks: Any, name: str) -> None:
    """Of ``branches`` each rank leaves to the end what its own samples did not use, and nobody used one layer."""
    early, usual = (ranks(2).run(_on_ranks, name, (), each, {}) for each in (True, False))
    for one, other in zip(early, usual, strict=True):
        assert_same(one, other)
        assert one[2] == (2 if name == "branches" else one[2])
        assert one[2] > 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"recompute": "blocks"}, {"dtype": "float32", "optimizer_state": "8bit"}])
def test_it_goes_with_others_that_save_memory(ranks: Any, more: dict[str, Any]) -> None:
    name = "wide" if "optimizer_state" in more else "deep"
    if name == "wide":
        pytest.importorskip("torchao")
    for options in (("offload=True",), ("reshard=False",)):
        early, usual = (ranks(2).run(_on_ranks, name, options, each, more)[0] for each in (True, False))
        assert_same(early, usual)


def test_a_run_goes_on_as_itself_and_without(tmp_path: Path) -> None:
    whole = trained(eight.task(), **EARLY)
    with engine(eight.task(), steps=4, **EARLY) as begun:
        for batch in begun.batches():
            begun.step(batch)
        begun.save(tmp_path)
    for settings in (EARLY, {}):
        with engine(eight.task(), **settings) as later:
            later.load(tmp_path)
            losses = [later.step(batch).loss for batch in later.batches()]
            assert losses == whole[0][4:]


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_it_is_verified_against_a_usual_update() -> None:
    assert verify(eight.task, processes=2, strategy="sharded", steps=4, device="cpu", **EARLY).passed


def test_the_run_says_it() -> None:
    result = evener.fit(tasks.plain, processes=1, steps=1, device="cpu", show=False, **EARLY)
    assert result.summary.updates == "updated in backward, 4 of 4 parameters"


# Less memory


def test_gradients_are_not_there_at_once() -> None:
    def peak(early: bool) -> int:
        config = RunConfig(device="cpu", update_in_backward=early)
        estimated = evener.estimate_memory(deep, config, processes=1).ranks[0]
        with Session(device="cpu") as session:
            measured = measure_memory(deep, config, session)
        assert estimated.peak == pytest.approx(measured.peak, rel=1e-2)
        return measured.peak

    gradients = sum(p.nbytes for p in deep().model().parameters())
    assert peak(False) - peak(True) > 0.6 * gradients


def _peak(early: bool) -> int:
    config = RunConfig(device="cpu", strategy="sharded", update_in_backward=early)
    with Session(device="cpu") as session:
        return measure_memory(eight_deep, config, session).at_peak["gradients"]


def eight_deep() -> Task:
    """Blocks that sharding gathers one by one."""
    block = lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))  # noqa: E731
    return replace(deep(), model=lambda: nn.Sequential(*(block() for _ in range(8)), nn.Linear(64, 10)))


def test_a_unit_of_gradients_is_there_at_once(ranks: Any) -> None:
    assert 2 * ranks(2).run(_peak, True)[0] < ranks(2).run(_peak, False)[0]


# In the midst of a step


class Breaks(torch.autograd.Function):
    """An error in backward, in some step."""

    left = 3

    @staticmethod
    def forward(_: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Breaks.left -= 1
        if Breaks.left == 0:
            raise RuntimeError("the power is gone")
        return gradient


class BreaksInTheMiddle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(Breaks.apply(self.first(x)))
        return result


def test_half_a_step_is_no_state_to_go_on_from(tmp_path: Path) -> None:
    Breaks.left = 3
    with engine(replace(tasks.plain(), model=BreaksInTheMiddle), **EARLY) as each:
        batches = each.batches()
        each.step(next(batches))
        each.step(next(batches))
        each.save(tmp_path)
        before = each.state_dict()["model"]
        with pytest.raises(RuntimeError, match="the power is gone"):
            each.step(next(batches))
        assert each.learner.updating == each.steps_done  # what a rank that stays looks at
        for asked in (lambda: each.save(tmp_path), each.state_dict):
            with pytest.raises(
                CheckpointError, match="step 2 ended in the midst of its backward pass, in which 2"
            ):
                asked()
        batches.close()
        each.load(tmp_path)
        assert all(torch.equal(value, before[name]) for name, value in each.state_dict()["model"].items())


class Reentrant(nn.Module):
    """One weight in two passes, each of which goes backward by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.again, x, use_reentrant=True)
        result: Tensor = self.last(x)
        return result


def test_a_gradient_that_comes_in_parts_is_seen() -> None:
    seen = pytest.raises(TaskError, match=r"the gradient of again\.\w+ comes in several parts")
    with engine(replace(tasks.plain(), model=Reentrant), **EARLY) as each, seen:
        each.step(next(each.batches()))


# What cannot be so


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clip_norm": 1.0}, "clip_norm=1.0 cannot be so: the norm is that of all gradients"),
        ({"non_finite": "skip"}, "non_finite=skip cannot be so"),
        ({"micro_batch": 2}, "micro_batch=2 cannot be so: the gradients of micro-batches add up"),
        ({"micro_batch": "auto"}, "micro_batch=auto cannot be so"),
        (
            {"memory_limit": "1GB"},
            "memory_limit=1GB cannot be so: a step that runs out of memory is taken again",
        ),
        ({"memory_limit_at": ("3:0:1GB",)}, "memory_limit=3:0:1GB cannot be so"),
        (
            {"offload": "optimizer", "offload_to": Path()},
            "offload=optimizer cannot be so: the optimizer's state comes back for many parameters at a time",
        ),
    ],
    ids=str,
)
def test_settings_that_ask_for_all_gradients(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        RunConfig(**EARLY, **settings)


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        (
            {"penalty": lambda model: model[0].weight.square().sum()},
            {},
            "a penalty of the task looks at them together",
        ),
        ({}, {"precision": "fp16", "dtype": None}, "precision fp16 looks at them together"),
        (
            {},
            {"strategy": "data_parallel", "devices": "cpu:0,cpu:1"},
            "strategy 'data_parallel' takes several",
        ),
        ({}, {"strategy": "layers", "devices": "cpu:0,cpu:1"}, "or uses several devices"),
    ],
)
def test_tasks_and_strategies_that_do(changes: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        engine(replace(tasks.plain(), **changes), **settings, **EARLY)


def _refused(settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as found:
        engine(tasks.plain(), **settings, **EARLY)
    return str(found.value)


def test_strategies_that_win_nothing(ranks: Any) -> None:
    for settings in ({"strategy": "ddp"}, {"strategy": "sharded", "strategy_option": ("zero=2",)}):
        for words in ranks(2).run(_refused, settings):
            assert "would win nothing" in words
            assert "use sharded with zero=3, or single" in words


def test_a_loop_of_ones_own_updates_itself() -> None:
    with engine(tasks.plain(), **EARLY) as each:
        batch = next(each.batches())
        outputs = each.model(batch.micro_batches[0].inputs)
        with pytest.raises(ConfigurationError, match="whose backward updates"):
            each.backward(outputs.sum(), 3)


class Own(torch.optim.SGD):
    """Nobody knows what it looks at."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Renamed(torch.optim.AdamW):
    """Steps as ever."""


def test_optimizers_that_are_not_known_have_to_say_so() -> None:
    optimizer = Own([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ConfigurationError, match=f"by an attribute, {SAYS_ALONE} = True"):
        check_optimizer(optimizer)
    setattr(optimizer, SAYS_ALONE, True)
    check_optimizer(optimizer)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ConfigurationError, match="would be called for each"):
        check_optimizer(optimizer)
    check_optimizer(Renamed([nn.Parameter(torch.zeros(2))]))


# One at a time


def test_one_parameter_is_stepped_with_its_own_options() -> None:
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    whole = torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": [second]}], lr=0.25, momentum=0.5)
    one = OneByOne(whole)
    one.refresh()
    first.grad = second.grad = torch.ones(2)
    one.step(second)
    assert first.tolist() == [1, 1]
    assert second.tolist() == [0.75, 0.75]
    assert list(whole.state) == [second]
    whole.load_state_dict(whole.state_dict())  # in place of what the other knew
    whole.param_groups[0]["lr"] = 0.125
    one.refresh()
    one.step(first)
    assert first.tolist() == [0.875, 0.875]
    assert set(whole.state) == {first, second}
