"""How tests run prepared loops, whose settings the loops do not say, and the parts of a small one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import evener
from evener.errors import EvenerError
from evener.training.prepare import prepare as preparing
from tests.tiers import ALWAYS, NIGHTLY

Weights = dict[str, Tensor]


@contextmanager
def with_settings(**settings: Any) -> Iterator[None]:
    """Each ``prepare`` inside gets these settings too; at the end the preparation is over."""
    made = preparing.config_of
    usual = {"device": "cpu", "timeout_seconds": 30.0} | settings
    try:
        with patch.object(preparing, "config_of", lambda given: made(usual | given)):
            yield
    finally:
        preparing.end()


def prepared(loop: Callable[..., Any], *given: Any, **settings: Any) -> Any:
    with with_settings(**settings):
        return loop(True, *given)


def divided(cases: Iterable[tuple[str, tuple[Any, ...]]], divisions: Sequence[str]) -> list[Any]:
    """Each named case by each division. The first, which gives both ranks samples, is always met, and with every
    third case the second, too."""
    return [
        pytest.param(
            *(*case, balance),
            id=f"{name}-{balance}",
            marks=ALWAYS if at == 0 or (at == 1 and place % 3 == 0) else NIGHTLY,
        )
        for place, (name, case) in enumerate(cases)
        for at, balance in enumerate(divisions)
    ]


def rows(count: int = 26, seed: int = 1) -> TensorDataset:
    drawn = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count, 4, generator=drawn, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(3, (count,), generator=drawn))


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


class Loop:
    """Its parts, prepared or as they are."""

    def __init__(
        self,
        is_prepared: bool,
        make: Callable[[nn.Module], Any] = sgd,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(4)
        parts = (
            model or model_of(),
            DataLoader(rows(), batch_size=6, **({"shuffle": True} | options)),
            F.cross_entropy,
        )
        self.model, self.loader, self.loss = parts
        self.optimizer = make(self.model)
        if is_prepared:
            made = evener.prepare(self.model, self.optimizer, self.loader, self.loss)
            self.model, self.optimizer, self.loader, self.loss = made

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(self.model(x), y)
        loss.backward()
        return loss

    def weights(self) -> Weights:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def said(loop: Callable[[bool], Any], **settings: Any) -> str:
    try:
        prepared(loop, **settings)
    except EvenerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
