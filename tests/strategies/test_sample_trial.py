"""A model that mixes the samples of a batch is told of on several ranks; no other one is, and none is changed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evener
from evener.strategies.sample_trial import ModelRun, SampleTrial
from evener.training.engine import Engine
from tests import tasks
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


class Layers(nn.Module):
    """Two layers; a subclass has a mixture of samples, or something that looks like one, between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.between(self.first(x)))
        return found

    def between(self, x: Tensor) -> Tensor:
        return x.tanh()


class Centred(Layers):
    def between(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class CentredAtFirstZero(Centred):
    """Says nothing in the first step but for values that are tried in place of zeros."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)


class NormalizedInTraining(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.mean: Tensor

    def between(self, x: Tensor) -> Tensor:
        if not self.training:
            return x - self.mean
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - x.mean(0)


class NormalizedByFunction(Layers):
    def between(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


class AttendingToTheBatch(Layers):
    """The attention of a model that takes the first dimension for the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def between(self, x: Tensor) -> Tensor:
        x = x[:, None]
        found: Tensor = (x + self.attention(x, x, x)[0])[:, 0]
        return found


class Drawing(Layers):
    """BatchNorm, dropout and random numbers of all kinds, each by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def between(self, x: Tensor) -> Tensor:
        x = F.dropout(self.dropout(self.norm(x)), 0.3, self.training) + torch.randn_like(x)
        return x * torch.bernoulli(torch.full((len(x), 1), 0.7)) * (1 + random.random())


class Chosen(Layers):
    """Experts, which get the samples that choose them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def between(self, x: Tensor) -> Tensor:
        chosen, found = x[:, :3].argmax(1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            found[chosen == number] = expert(x[chosen == number])
        return found


class DrawingOfItsOwn(Layers):
    """Draws from a generator and an iterator that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn, self.numbers = [torch.Generator().manual_seed(1)], iter(range(1000))

    def between(self, x: Tensor) -> Tensor:
        return x * torch.rand((), generator=self.drawn[0]) * next(self.numbers)


class Counting(Layers):
    """Computes something else in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, list[int]()
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor

    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        self.seen.append(len(x))
        return x * (1 + 0.1 * self.calls + 0.1 * len(self.seen) + 0.1 * float(self.count))


class Telling(Layers):
    """Returns, besides a row for each sample, four numbers of the whole batch: as many as samples are tried."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        hidden = self.first(x)
        return self.last(hidden), hidden.mean(0)[:4], torch.stack([hidden] * 4)


class Brought(Layers):
    """Centres over the samples of all ranks."""

    def between(self, x: Tensor) -> Tensor:
        own = evener.nn.without_placeholder(x)
        sums = torch.cat([own.sum(0), own.new_full((1,), float(len(own)))])
        sums = evener.nn.all_reduce(sums, evener.nn.data_group())
        return x - sums[:-1] / sums[-1]


class Messaging(Layers):
    """Sends a message of its own, which the other ranks would miss."""

    def between(self, x: Tensor) -> Tensor:
        torch.distributed.all_reduce(torch.ones(()))
        return x - x.mean(0)


class Compared(Layers):
    """Returns a number for each pair of samples, too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = self.first(x)
        return self.last(hidden), hidden @ hidden.T


class Recurrent(Layers):
    """Returns a state with the samples along its second dimension, as that of an LSTM, too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = self.between(self.first(x))
        return self.last(hidden), hidden[None]


def total(outputs: Any, targets: Tensor) -> Tensor:
    scores = outputs[0] if isinstance(outputs, tuple) else outputs
    return F.cross_entropy(scores, targets, reduction="sum")


def of_samples(told: list[warnings.WarningMessage]) -> list[str]:
    """Returns the warnings that a trial of samples gave."""
    return [str(each.message) for each in told if "beside it in the batch" in str(each.message)]


def check_told(first: list[str], second: list[str]) -> None:
    """Checks what the two ranks said of a model that mixes samples."""
    assert len(first) == 1
    assert "all_gather" in first[0]
    assert not second


def trained(
    model: type[nn.Module], settings: dict[str, Any] | None = None, tries: bool = True
) -> tuple[list[str], dict[str, Tensor]]:
    """Returns the warnings of a rank about samples, and its weights after three steps."""
    with warnings.catch_warnings(record=True) as told, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        random.seed(1)  # which Evener leaves to the script
        if not tries:
            patch.setattr(SampleTrial, "run", lambda *_: None)
        task = tasks._task(model=model, loss=evener.loss(total, count=len), evaluate=None, metrics={})
        with Engine(task, **{"batch_size": 12, "steps": 3, "device": "cpu"} | (settings or {})) as engine:
            for batch in engine.batches():
                engine.step(batch)
            weights = {name: value.clone() for name, value in engine.model.state_dict().items()}
    return of_samples(told), weights


MIXING = (
    Centred,
    CentredAtFirstZero,
    NormalizedInTraining,
    NormalizedByFunction,
    AttendingToTheBatch,
    Compared,
)


@pytest.mark.parametrize("model", MIXING)
def test_a_model_that_mixes_samples_is_told_of_once_by_the_first_rank(
    ranks: Ranks, model: type[nn.Module]
) -> None:
    (first, _), (second, _) = ranks(2).run(trained, model)
    check_told(first, second)


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"balance": "1,5"}])
@pytest.mark.parametrize("model", [Layers, Drawing, Chosen, Counting, Telling, Brought, Recurrent])
def test_no_other_model_is(ranks: Ranks, model: type[nn.Module], settings: dict[str, Any]) -> None:
    assert not any(told for told, _ in ranks(2).run(trained, model, settings))


@pytest.mark.parametrize(
    "model", [Drawing, DrawingOfItsOwn, Counting, NormalizedInTraining, CentredAtFirstZero]
)
def test_a_trial_changes_no_bit_of_the_training(ranks: Ranks, model: type[nn.Module]) -> None:
    (_, tried), _ = ranks(2).run(trained, model)
    (told, untried), _ = ranks(2).run(trained, model, None, False)
    assert all(torch.equal(value, untried[name]) for name, value in tried.items())
    assert not told


def test_no_message_is_sent_in_a_trial(ranks: Ranks) -> None:
    assert not any(told for told, _ in ranks(2).run(trained, Messaging, {"balance": "3,1"}))


def test_one_rank_has_nothing_to_try() -> None:
    assert not trained(Centred)[0]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ((torch.ones(5, 5), torch.ones(5)), True),  # a mask of positions and a row for all
        ((torch.ones(1, 9), torch.tensor(2.0)), True),
        ((torch.arange(11),), False),  # the words of all samples, one after another
    ],
)
def test_samples_are_chosen_where_all_else_is_the_same_for_any(
    others: tuple[Tensor, ...], expected: bool
) -> None:
    inputs = torch.zeros(3, 5, dtype=torch.long), *others
    run = ModelRun(nn.Identity(), nn.Identity(), inputs, torch.arange(3), False, (3, 3))
    assert run.is_by_samples is expected
