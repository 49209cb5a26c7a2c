"""Buffers that ranks write from their own samples are told of, once; those that follow from the weights are not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.core.config.run_config import RunConfig
from evener.training.engine import Engine
from tests.tasks import _task


class Centered(nn.Module):
    """By a running mean of its own, which is no BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("none", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            self.count += 1
            self.none.zero_()
        out: Tensor = self.layer(x - self.mean)
        return out


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), nn.Linear(4, 3))


def said(model: Any, balance: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = RunConfig(device="cpu", steps=4, balance=balance, batch_norm="exact")
        with Engine(_task(model=model), config) as engine:
            for batch in engine.batches():
                engine.step(batch)
    return [str(each.message) for each in caught if "buffer" in str(each.message)]


def test_ranks_write_what_their_samples_say(ranks: Any) -> None:
    (told,), silent = ranks(2).run(said, Centered, "equal")
    assert told.startswith("buffer mean is not the same on all ranks after a step")
    assert not silent


@pytest.mark.parametrize(("model", "balance"), [(normed, "equal"), (normed, "1,0"), (Centered, "1,0")])
def test_what_one_rank_writes_or_all_alike_is_not_told(ranks: Any, model: Any, balance: str) -> None:
    assert ranks(2).run(said, model, balance) == [[], []]


class Counting(nn.Module):
    """Counts its samples in a type that backends do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int16))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        out: Tensor = self.layer(x)
        return out


def counted() -> list[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = RunConfig(device="cpu", steps=2, balance="3,1")
        with Engine(_task(model=Counting), config) as engine:
            for batch in engine.batches():
                engine.step(batch)
            return list(engine.model.seen.tolist())


def test_a_buffer_of_any_type_is_that_of_one_rank(ranks: Any) -> None:
    first, second = ranks(2).run(counted)
    assert first == second
    assert first[0] > 0
