"""Batches of a loop of one's own that are divided by the costs of their samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import evener
from evener.errors import EvenerError
from evener.training.prepare import prepare as preparing
from tests.training.prepare.running import Weights, model_of, prepared, rows, sgd

COSTS = [9, 1, 1, 1, 2, 2, 3, 1, 5, 1] * 2 + [1, 1, 1, 1, 1, 1]


class Measured(torch.utils.data.Dataset[Any]):
    """Data with a column of costs."""

    lengths = COSTS

    def __len__(self) -> int:
        return len(COSTS)

    def __getitem__(self, index: int) -> Any:
        return rows()[index]


def trained(is_prepared: bool, cost: Any = None) -> tuple[Weights, list[tuple[int, ...]]]:
    torch.manual_seed(4)
    model: Any = model_of()
    optimizer = sgd(model)
    loader: Any = DataLoader(Measured(), batch_size=9)
    loss: Any = F.cross_entropy
    if is_prepared:
        model, optimizer, loader, loss = evener.prepare(model, optimizer, loader, loss, cost=cost)
    shares = list[tuple[int, ...]]()
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            if is_prepared:
                shares.append(preparing.current("").current_batch("").shares)
    return model.state_dict(), shares


def cost_of(index: int) -> float:
    return COSTS[index]


@pytest.mark.parametrize(
    ("cost", "balance"),
    [(COSTS, "equal"), (cost_of, "1,1"), ("lengths", "3,1"), (torch.tensor(COSTS), "auto")],
    ids=["list", "function", "column", "by speed"],
)
def test_cuts_follow_costs_and_the_training_stays_the_same(ranks: Any, cost: Any, balance: str) -> None:
    expected, _ = trained(False)
    for found, shares in ranks(2).run(prepared, trained, cost, balance=balance):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-12)
        if balance in (
            "equal",
            "1,1",
        ):  # of costs 9 1 1 1 2 2 3 1 5, then 1 9 1 1 1 2 2 3 1, then 5 1 1 1 1 1 1 1
            assert shares == [(4, 5), (2, 7), (2, 6)] * 2
        if balance == "3,1":
            assert shares[0] == (7, 2)
        assert all(sum(each) in (9, 8) for each in shares)


def learned(_: bool) -> list[Any]:
    """What the balancer is told."""
    torch.manual_seed(4)
    model, loader = evener.prepare(model_of(), DataLoader(Measured(), batch_size=9), cost=COSTS)
    told = list[Any]()
    loader.balancer.observe_costs = lambda *given: told.append(given)
    loss = evener.prepare(F.cross_entropy)
    for x, y in loader:
        loss(model(x), y).backward()
    return told


def test_the_balancer_learns_by_cost(ranks: Any) -> None:
    mean = sum(COSTS) / len(COSTS)
    for told in ranks(2).run(prepared, learned, balance="3,1"):
        step, asked, costs, seconds = told[0]
        assert (step, tuple(asked)) == (0, (7, 2))
        assert costs == pytest.approx([cost * mean**-1 for cost in (19, 6)])
        assert len(seconds) == 2


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from rows()


class Names(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, name: str) -> Tensor:
        return torch.ones(4, dtype=torch.float64)


def given(data: Any, cost: Any, loaders: int = 1, **options: Any) -> Callable[[bool], None]:
    def run(_: bool) -> None:
        found = [DataLoader(data, **options or {"batch_size": 2}) for _ in range(loaders)]
        for loader in evener.prepare(model_of(), *found, cost=cost)[1:] if found else []:
            next(iter(loader))
        if not found:
            evener.prepare(model_of(), cost=cost)

    return run


def by_rank(index: int) -> float:
    """Another cost on rank 1, of a sample that is not compared at the start."""
    return 100.0 if index == 1 and torch.distributed.get_rank() else 1.0


class Many(torch.utils.data.Dataset[Any]):
    """More data than are compared at the start."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        return rows()[0]


def unlike(_: bool) -> None:
    model, loader, loss = evener.prepare(
        model_of(), DataLoader(Many(), batch_size=8), F.cross_entropy, cost=by_rank
    )
    for x, y in loader:
        loss(model(x), y).backward()
        return


def refused(case: str) -> str:
    loops: dict[str, Callable[[bool], None]] = {
        "no loader": given(Measured(), COSTS, 0),
        "two loaders": given(Measured(), COSTS, 2),
        "stream": given(Endless(), COSTS),
        "negative": given(Measured(), [-1, *COSTS[1:]]),
        "short": given(Measured(), COSTS[:5]),
        "no column": given(Measured(), "tokens"),
        "names": given(Names(), [1, 2, 3, 4], batch_sampler=[["a", "b"], ["c", "d"]]),
        "unlike": unlike,
    }
    try:
        prepared(loops[case])
    except EvenerError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no loader", "this call of evener.prepare has none: give it in the call with the loader"),
        ("two loaders", "has 2: give it in the call"),
        ("stream", "an iterable data set has none: leave it out"),
        ("negative", "cost=... of sample 0 of the training set is -1; a cost must be positive"),
        ("short", "cost=... has the shape (5,), and the training set 26 samples"),
        ("no column", "cost=... is 'tokens', and the training set, a Measured, has no column or attribute"),
        ("names", "the sampler yields something of type str"),
        ("unlike", "the cost of a sample must be the same on all ranks"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(ranks: Any, case: str, words: str) -> None:
    for said in ranks(2).run(refused, case):
        assert words in said
