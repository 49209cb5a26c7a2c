"""Losses of several rows for each sample, whose order is that of one device: stacked, or those of a sample together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import evener
from evener.errors import LossError
from tests.training.prepare.running import with_settings

Call = Callable[[nn.Module, Any, Tensor, Tensor], Tensor]


def of_stacked(model: nn.Module, loss: Any, one: Tensor, other: Tensor) -> Tensor:
    found: Tensor = loss(model(torch.cat([one, other])))
    return found


def of_pairs(model: nn.Module, loss: Any, one: Tensor, other: Tensor) -> Tensor:
    found: Tensor = loss(model(torch.stack([one, other], 1).flatten(0, 1)))
    return found


def of_halves(rows: Tensor) -> Tensor:
    """That of a reward model."""
    chosen, rejected = rows.chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def of_views(rows: Tensor) -> Tensor:
    """Contrastive, as SimCLR's."""
    near = F.normalize(rows) @ F.normalize(rows).T
    near = near.masked_fill(torch.eye(len(rows), dtype=torch.bool), -1e9)
    return F.cross_entropy(near, torch.arange(len(rows)).roll(len(rows) // 2))


def of_neighbours(rows: Tensor) -> Tensor:
    return -F.logsigmoid(rows[0::2] - rows[1::2]).mean()


def in_single(rows: Tensor) -> Tensor:
    return of_halves(rows.float())


def of_places(rows: Tensor) -> Tensor:
    """Depends on the order of samples."""
    return (rows.chunk(2)[0] * torch.arange(len(rows) // 2)[:, None]).mean() + of_halves(rows)


def steps(loss: Any, call: Call, is_prepared: bool) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    last = nn.Linear(5, 3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), last).double()
    if loss is of_halves:
        nn.init.zeros_(last.weight)  # so that all rows are the same at first
    loader = DataLoader(TensorDataset(*torch.randn(2, 17, 4).double()), 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if is_prepared:
        model, optimizer, loader, loss = evener.prepare(model, optimizer, loader, loss)
    told = []
    for one, other in loader:
        value = call(model, loss, one, other)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        told.append(value.item())
    return told, torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()


def on_ranks(loss: Any, call: Call, balance: str) -> Any:
    with with_settings(balance=balance):
        return steps(loss, call, True)


@pytest.mark.parametrize(
    ("loss", "call", "balance", "tolerance"),
    [
        (of_halves, of_stacked, "3,1", 1e-9),
        (of_views, of_stacked, "equal", 1e-9),
        (of_neighbours, of_pairs, "3,1", 1e-9),
        (in_single, of_stacked, "3,1", 1e-5),
    ],
)
def test_rows_are_in_the_order_of_one_device(
    ranks: Any, loss: Any, call: Call, balance: str, tolerance: float
) -> None:
    told, weights = steps(loss, call, False)
    for own_told, own in ranks(2).run(on_ranks, loss, call, balance):
        assert own_told == pytest.approx(told, rel=tolerance)
        assert own == pytest.approx(weights, rel=tolerance, abs=tolerance)


def refusal() -> str:
    try:
        on_ranks(of_places, of_stacked, "3,1")
    except LossError as error:
        return str(error)
    return "nothing"


def test_an_order_that_cannot_be_told_is_refused(ranks: Any) -> None:
    for told in ranks(2).run(refusal):
        assert "2 rows for each sample" in told, told
        assert "chunk" in told, told
