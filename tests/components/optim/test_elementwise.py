"""How much an optimizer looks at: known, said, or tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from evener.components.optim.elementwise import looks_across, updated_whole, updates_alone
from tests.strategies.whole_tasks import MuonAndAdamW, Shampoo


class Steps(torch.optim.Optimizer):
    """Divides by the norm of all gradients, or adds noise, or neither."""

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, {})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm() if self.kind == "norm" else 1.0
        for p in held:
            p.sub_(torch.randn_like(p) if self.kind == "noise" else p.grad / norm)


class Adapting(torch.optim.Optimizer):
    """Estimates its rate from all weights, beginning with a small one (Defazio and Mishchenko, ICML 2023)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.rate = 1e-6

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        starts = [self.state[p].setdefault("start", p.clone()) for p in held]
        gone = sum(float((p.grad * (start - p)).sum()) for p, start in zip(held, starts, strict=True))
        self.rate = max(self.rate, gone / sum(float(p.grad.abs().sum()) for p in held))
        for p in held:
            p.sub_(p.grad, alpha=self.rate)


class Renamed(torch.optim.AdamW):
    """Other defaults, the same step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.5)


class Changed(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:
        super().step(closure)


def parameters(device: str = "cpu") -> list[nn.Parameter]:
    with torch.device(device):
        return [nn.Parameter(torch.ones(shape)) for shape in ((5, 4), (4, 4), (3, 5), (6,))]


def of(kind: type[Any], *args: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = kind(parameters(), *args)
    return made


def test_optimizers_that_are_known() -> None:
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Rprop, torch.optim.ASGD, Renamed):
        assert updated_whole(of(kind)) == []
    for kind in (torch.optim.Adafactor, Shampoo, MuonAndAdamW, Changed):
        assert len(updated_whole(of(kind))) == 4
    matrices = parameters()[:3]
    assert len(updated_whole(torch.optim.Muon(matrices))) == 3
    assert updates_alone(torch.optim.Muon(matrices))
    assert not updates_alone(of(Shampoo))


def test_an_optimizer_says_what_it_is() -> None:
    optimizer: Any = of(Changed)
    optimizer.elementwise = True
    assert updated_whole(optimizer) == []
    mixed: Any = of(MuonAndAdamW)
    mixed.elementwise = lambda group: "ns_steps" not in group
    assert [p.ndim for p in updated_whole(mixed)] == [2, 2, 2]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_trial_finds_what_looks_at_several_weights_or_draws(device: str) -> None:
    held = parameters(device)
    assert looks_across(Steps(held, "norm"))
    assert looks_across(Steps(held, "noise"))
    assert looks_across(Adapting(held))
    for optimizer in (Steps(held, "alone"), Shampoo(held), MuonAndAdamW(held), torch.optim.Adafactor(held)):
        assert not looks_across(optimizer)
        assert not optimizer.state
    assert all(p.grad is None for p in held)


def test_a_trial_that_fails_says_nothing() -> None:
    optimizer = Steps(parameters(), "norm")
    del optimizer.kind
    assert not looks_across(optimizer)
