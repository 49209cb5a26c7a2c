"""Momentum that changes once in several updates, against the optimizer's own steps with the mean of gradients."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.errors import ConfigurationError
from evener.strategies import Asynchronous
from evener.strategies.asynchronous.delayed_momentum import check_momentum, delay_momentum
from tests.comparing import handed_on, worst
from tests.strategies.asynchronous.test_asynchronous import ROUNDING, on, repeated, stalling, trained
from tests.strategies.local_steps.test_local_steps import nesterov, task

OPTIONS: dict[str, dict[str, Any]] = {
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "classic": {"momentum": 0.5},
    "weight decay": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "fused": {"momentum": 0.9, "fused": True},
}
LR = 0.1


def two() -> list[nn.Parameter]:
    """A parameter that always has a gradient, and one that has none now and then."""
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(3, generator=generator, dtype=torch.float64)) for _ in range(2)]


def gradients(number: int) -> list[list[Tensor | None]]:
    generator = torch.Generator().manual_seed(2)
    made = torch.randn(number, 2, 3, generator=generator, dtype=torch.float64)
    return [[of_both[0], of_both[1] if at % 4 < 2 else None] for at, of_both in enumerate(made)]


def step(optimizer: torch.optim.Optimizer, given: list[Tensor | None]) -> None:
    for parameter, gradient in zip(optimizer.param_groups[0]["params"], given, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
    optimizer.step()


def mean(given: list[list[Tensor | None]]) -> list[Tensor | None]:
    columns = [[each for each in column if each is not None] for column in zip(*given, strict=True)]
    return [torch.stack(column).sum(0) / len(given) if column else None for column in columns]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("updates", [1, 2, 3])
def test_several_updates_are_one_step_with_their_mean(options: dict[str, Any], updates: int) -> None:
    ours = torch.optim.SGD(two(), lr=LR, **options)
    theirs = torch.optim.SGD(two(), lr=LR, **options)
    delay_momentum(ours, updates)
    given = gradients(4 * updates)
    for at in range(0, len(given), updates):
        for each in given[at : at + updates]:
            step(ours, each)
        step(theirs, mean(given[at : at + updates]))
        for one, other in zip(*(each.param_groups[0]["params"] for each in (ours, theirs)), strict=True):
            assert torch.equal(one, other) if updates == 1 else torch.allclose(one, other, rtol=1e-12)


def test_updates_in_between_are_plain_and_of_their_part() -> None:
    ours = torch.optim.SGD(two(), lr=LR, momentum=0.9, nesterov=True, weight_decay=0.1)
    delay_momentum(ours, 3)
    (first, _), (given, _) = two(), gradients(1)[0]
    step(ours, [given, None])
    assert given is not None
    assert torch.allclose(ours.param_groups[0]["params"][0], first - LR * given / 3, rtol=1e-12)
    assert ours.param_groups[0]["momentum"] == 0.9
    assert "momentum_buffer" not in ours.state[ours.param_groups[0]["params"][0]]


def test_saved_state_goes_on_in_between() -> None:
    ours = torch.optim.SGD(two(), lr=LR, momentum=0.9)
    delay_momentum(ours, 3)
    given = gradients(9)
    for each in given[:4]:
        step(ours, each)
    other = torch.optim.SGD(copy.deepcopy(ours.param_groups[0]["params"]), lr=LR, momentum=0.9)
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    delay_momentum(other, 3)
    for each in given[4:]:
        step(ours, each)
        step(other, each)
    assert all(map(torch.equal, *(each.param_groups[0]["params"] for each in (ours, other))))


@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, lr=0.1), partial(torch.optim.AdamW, lr=0.1)])
@pytest.mark.parametrize(
    "more", [{}, {"momentum": 0.9, "dampening": 0.1}, {"momentum": 0.9, "maximize": True}]
)
def test_other_optimizers_are_refused(optimizer: Any, more: dict[str, Any]) -> None:
    made = optimizer([nn.Parameter(torch.ones(1))], **(more if optimizer.func is torch.optim.SGD else {}))
    with pytest.raises(ConfigurationError, match=r"delayed_nesterov is for torch\.optim\.SGD with"):
        check_momentum(made)


def test_delayed_once_it_is_plain_training() -> None:
    build = partial(task, nesterov)
    plain = trained(build, {"strategy": "single"})
    delayed = trained(build, {"strategy": Asynchronous(sync_every=3, delayed_nesterov=1)})
    assert worst(plain[0], delayed[0]) < ROUNDING
    twice = trained(build, {"strategy": Asynchronous(sync_every=3, delayed_nesterov=2)})
    assert worst(plain[0], twice[0]) > 1e-3


def test_a_repetition_has_the_same_bits(ranks: Any) -> None:
    build = partial(stalling, optimizer=nesterov)
    settings = {"strategy": Asynchronous(sync_every=4, delayed_nesterov=2, damping=0.5)}
    found = on(ranks, 2, build, **settings)
    assert worst(found[0], repeated(found, 2, build, **settings)[0]) == 0
    without = replace(settings["strategy"], delayed_nesterov=0)
    assert worst(found[0], repeated(found, 2, build, strategy=without)[0]) > 1e-3


def test_a_checkpoint_between_two_changes_of_momentum_goes_on(ranks: Any) -> None:
    settings = {"strategy": Asynchronous(sync_every=4, staleness=0, delayed_nesterov=3)}
    whole, *_ = handed_on(ranks, partial(task, nesterov), [(1, settings)], [12])
    legs, *_ = handed_on(ranks, partial(task, nesterov), [(1, settings), (2, settings)], [4, 12])
    assert worst(whole["model"], legs["model"]) < ROUNDING
