"""Means that a loop or a model computes itself are those of one device, or refused, where nothing is said of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import evener
from evener.errors import EvenerError
from tests.training.prepare.running import prepared

WORDS, LENGTH = 5, 6
Loss = Callable[[Tensor, Tensor], Tensor]


def texts() -> TensorDataset:
    """Each with another number of words, some with one."""
    drawn = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (23, LENGTH), generator=drawn)
    targets = words.clone()
    for row, length in enumerate(torch.randint(1, LENGTH, (23,), generator=drawn)):
        targets[row, length:] = -100
    return TensorDataset(words, targets)


def of_words(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def by_mask(outputs: Tensor, targets: Tensor) -> Tensor:
    each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return each[targets.flatten() != -100].mean() / 2


def of_two_heads(outputs: Tensor, targets: Tensor) -> Tensor:
    return of_words(outputs, targets) + 0.4 * of_words(outputs.sin(), targets)


def of_many_heads(outputs: Tensor, targets: Tensor) -> Tensor:
    return sum((of_words(outputs * factor, targets) for factor in range(1, 7)), start=outputs.new_zeros(()))


def by_quotient(outputs: Tensor, targets: Tensor) -> Tensor:
    each, mask = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none"), targets != -100
    return (each * mask).sum() / mask.sum()


def of_many_quotients(outputs: Tensor, targets: Tensor) -> Tensor:
    return sum(
        (by_quotient(outputs * factor, targets) for factor in range(1, 7)), start=outputs.new_zeros(())
    )


def of_both(outputs: Tensor, targets: Tensor) -> Tensor:
    return of_words(outputs, targets) + 0.1 * outputs.square().mean()


def of_samples(outputs: Tensor, targets: Tensor) -> Tensor:
    """A constant divides a sum, and what weighs a sample does not depend on it."""
    each = outputs.square().mean((1, 2))
    scale = torch.tensor(3.0)
    return each.mean() + 0.1 * torch.stack([each.sum() / len(each), each.mean()]).mean() / scale


def trained(is_prepared: bool, loss: Loss, evaluates: bool = False) -> tuple[list[float], Tensor, list[str]]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(texts(), batch_size=7)
    if is_prepared:
        model, optimizer, loader = evener.prepare(model, optimizer, loader)
    found = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for x, y in loader:
            optimizer.zero_grad()
            value = loss(model(x), y)
            value = evener.global_mean(value) if is_prepared else value
            value.backward()
            optimizer.step()
            found.append(value.item())
        if evaluates:
            with torch.no_grad():
                for x, y in loader:
                    evener.global_mean(loss(model(x), y))
    return (
        found,
        torch.cat([p.detach().flatten() for p in model.parameters()]),
        [str(each.message) for each in told],
    )


@pytest.mark.parametrize(
    "loss", [of_words, by_mask, of_two_heads, of_many_heads, of_samples], ids=lambda each: each.__name__
)
@pytest.mark.parametrize("balance", ["equal", "5,1", "1,0"])
def test_a_mean_is_weighed_by_its_terms(ranks: Any, loss: Loss, balance: str) -> None:
    values, weights, _ = trained(False, loss)
    for own, own_weights, _ in ranks(2).run(partial(prepared, balance=balance), trained, loss):
        assert own == pytest.approx(values, rel=1e-9)
        torch.testing.assert_close(own_weights, weights, rtol=1e-9, atol=1e-11)


def refusal(loss: Loss) -> str:
    with pytest.raises(EvenerError) as refused:
        prepared(trained, loss, balance="3,1")
    return str(refused.value)


@pytest.mark.parametrize("loss", [by_quotient, of_many_quotients, of_both], ids=lambda each: each.__name__)
def test_a_mean_whose_terms_are_not_certain_is_refused_on_all_ranks(ranks: Any, loss: Loss) -> None:
    for told in ranks(2).run(refusal, loss):
        assert "evener.global_mean(value, count)" in told


def test_a_mean_without_a_graph_is_warned_of(ranks: Any) -> None:
    for _, _, told in ranks(2).run(partial(prepared, balance="3,1"), trained, of_words, True):
        assert len([each for each in told if "without a graph" in each]) == 1


def of_some(is_prepared: bool) -> None:
    """A rank without words leaves the loss out."""
    model, loader = (
        nn.Linear(2, 3),
        DataLoader(TensorDataset(torch.ones(4, 2), torch.tensor([0, 1, 2, -100])), 4),
    )
    model, loader = evener.prepare(model, loader)
    for x, y in loader:
        outputs = model(x)
        evener.global_mean(F.cross_entropy(outputs, y) if (y >= 0).any() else outputs.sum() * 0)


def refusal_of_some() -> str:
    with pytest.raises(EvenerError) as refused:
        prepared(of_some, balance="3,1")
    return str(refused.value)


def test_a_loss_that_a_rank_leaves_out_is_refused(ranks: Any) -> None:
    for told in ranks(2).run(refusal_of_some):
        assert "on one rank and over samples on another" in told
