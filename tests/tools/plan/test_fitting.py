"""A model that does not fit with the default strategy gets one with which it fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import evener
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.tools.plan import fitting_strategy
from evener.tools.plan.fitting import card_nbytes


def wide() -> Task:
    """A few samples, and weights of 2 MiB."""
    return Task(
        model=lambda: nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        train=TensorDataset(torch.rand(8, 512), torch.rand(8, 512)),
        batch_size=8,
    )


def settings(**more: Any) -> RunConfig:
    return RunConfig(**{"device": "cpu", "processes": 2} | more)


@pytest.fixture(scope="module")
def needed() -> dict[str, int]:
    """Bytes that ways need."""
    ways = {"ddp": (), "zero=3": ("zero=3",)}
    return {
        name: evener.estimate_memory(
            wide, settings(strategy="sharded" if options else "ddp", strategy_option=options)
        ).peak
        for name, options in ways.items()
    }


def test_what_fits_stays_as_it_is(needed: dict[str, int]) -> None:
    asked = settings(memory_limit=str(needed["ddp"]))
    assert fitting_strategy(wide, asked) == (asked, "")
    assert fitting_strategy(wide, settings()) == (settings(), "")  # no limit


def test_sharded_weights_fit_where_whole_ones_do_not(needed: dict[str, int]) -> None:
    assert needed["zero=3"] < needed["ddp"]
    config, words = fitting_strategy(wide, settings(memory_limit=str(needed["ddp"] - 1)))
    assert config.strategy == "sharded"
    found = evener.estimate_memory(wide, config)
    assert found.peak < needed["ddp"]
    assert "ddp" in words
    smallest, _ = fitting_strategy(wide, settings(memory_limit=str(needed["zero=3"])))
    assert smallest.strategy_option == ("zero=3",)


def on_cards(monkeypatch: pytest.MonkeyPatch, nbytes: int | None) -> None:
    """Lets ranks of this machine have memory of their own, as on accelerators."""
    monkeypatch.setattr("evener.tools.plan.fitting.kind_taken", lambda _: "cuda")
    monkeypatch.setattr("evener.tools.plan.fitting.card_nbytes", lambda kind, rank: nbytes)


def test_the_memory_of_an_accelerator_is_a_limit(
    needed: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cards(monkeypatch, needed["ddp"] - 1)
    config, words = fitting_strategy(wide, settings())
    assert config.strategy == "sharded"
    assert "ddp" in words
    for nbytes in (needed["ddp"], None):
        on_cards(monkeypatch, nbytes)
        assert fitting_strategy(wide, settings()) == (settings(), "")


def test_a_small_model_with_large_samples_is_not_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples are computed in pieces if memory lacks. Weights and state of this one take 8 MiB."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr("evener.tools.plan.fitting.estimate_memory", refuse)
    on_cards(monkeypatch, 17 << 20)
    assert fitting_strategy(wide, settings()) == (settings(), "")


def test_the_memory_of_a_card_leaves_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.hardware.accelerators.whole_memory_of", lambda device: 80 << 30)
    found = card_nbytes("cuda", 0)
    assert found is not None
    assert 74 << 30 < found < 75 << 30
    monkeypatch.setattr("evener.hardware.accelerators.whole_memory_of", lambda device: None)
    assert card_nbytes("cuda", 0) is None


@pytest.mark.parametrize(
    "more",
    [
        {"strategy": "ddp"},
        {"mesh": "data=2"},
        {"processes": 1},
        {"processes": "2:3"},
        {"micro_batch": 4},
        {"memory_limit": "1KB"},
    ],
)
def test_what_the_user_says_is_left_alone(more: dict[str, Any]) -> None:
    asked = settings(**{"memory_limit": "1MB"} | more)
    assert fitting_strategy(wide, asked) == (asked, "")


def test_a_model_that_cannot_be_estimated_is_left_alone() -> None:
    asked = settings(memory_limit="1MB", compress="powersgd")
    assert fitting_strategy(wide, asked) == (asked, "")
