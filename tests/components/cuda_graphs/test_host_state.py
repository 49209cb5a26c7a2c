"""What changes in Python are seen, by which name, and undone."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.components.cuda_graphs import host_state
from evener.components.cuda_graphs.host_state import HostState
from evener.components.cuda_graphs.pass_state import PassState, host_draws

STEEPNESS = 1.0


class Settings:
    def __init__(self) -> None:
        self.rate, self.cells = 0.5, {"depth": [1, 2]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Dropout(0.1)])
        self.register_buffer("seen", torch.zeros(2))
        self.settings, self.passes, self.name = Settings(), 1000, ("a", 1.5)
        self.kept, self.later = torch.zeros(3), {}

    def forward(self, x: Tensor) -> Tensor:
        return x * STEEPNESS


def loss_with(weights: list[float]) -> Callable[[Tensor], Tensor]:
    number = 1

    def loss(x: Tensor) -> Tensor:
        return x * weights[0] * number

    def count() -> None:
        nonlocal number
        number += 1

    loss.count = count  # type: ignore[attr-defined]
    return loss


def replace_weight(net: Net) -> None:
    net.layers[0].weight.data = torch.ones(2, 2)


CHANGES: dict[str, Callable[[Net], Any]] = {
    "passes": lambda net: setattr(net, "passes", net.passes + 1),
    "layers.1.p": lambda net: setattr(net.layers[1], "p", 0.2),
    "layers.1.training": lambda net: net.layers[1].eval(),
    "settings.rate": lambda net: setattr(net.settings, "rate", 0.25),
    "settings.cells.depth[1]": lambda net: net.settings.cells["depth"].__setitem__(1, 3),
    "settings.cells.depth": lambda net: net.settings.cells["depth"].append(3),
    "later": lambda net: net.later.update(new=1),
    "layers.0.weight": replace_weight,
    "layers.0.bias": lambda net: net.layers[0].bias.requires_grad_(False),
    "seen": lambda net: setattr(net, "seen", torch.zeros(2)),
    "name": lambda net: setattr(net, "name", ("a", 2.5)),
    "layers.0": lambda net: net.layers.__setitem__(0, nn.Identity()),
    "an attribute of the model": lambda net: setattr(net, "new", 1),
    "layers.0._forward_hooks": lambda net: net.layers[0].register_forward_hook(print),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named(name: str) -> None:
    net = Net()
    state = HostState({"": net})
    assert state.change() == ""
    CHANGES[name](net)
    assert state.change() == name


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - {"layers.0.weight", "layers.0.bias"}))
def test_a_change_is_undone(name: str) -> None:
    net = Net()
    state = HostState({"": net})
    CHANGES[name](net)
    state.restore()
    assert state.change() == ""


def test_new_objects_of_the_same_value_are_no_change() -> None:
    net = Net()
    state = HostState({"": net})
    net.passes, net.name = int("1000"), ("".join(["a"]), float("1.5"))
    net.seen += 1
    assert state.change() == ""


def test_variables_around_the_loss_are_seen() -> None:
    weights = [0.5]
    loss: Any = loss_with(weights)
    state = HostState({"the loss": partial(loss, 1)})
    weights[0] = 0.25
    assert state.change() == "the loss[0]"
    state.restore()
    assert weights == [0.5]
    assert state.change() == ""
    loss.count()
    assert state.change() == "a variable around loss"


def test_global_numbers_of_the_users_functions_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    state = HostState({"": Net()})
    monkeypatch.setitem(globals(), "STEEPNESS", 2.0)
    assert state.change() == "the global variable STEEPNESS"


def test_a_hook_on_a_gradient_is_named() -> None:
    net = Net()
    state = HostState({"": net})
    assert state.hook() == ""
    handle = net.layers[0].weight.register_hook(lambda gradient: gradient)
    assert state.hook() == "layers.0.weight"
    handle.remove()
    assert state.hook() == ""


def test_the_walk_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_state, "MOST_PLACES", 10)
    net = Net()
    net.data = [[number] for number in range(1000)]
    state = HostState({"": net})
    assert state.change() == ""


def test_things_that_refer_to_each_other_are_walked_once() -> None:
    net = Net()
    net.settings.cells["self"] = net.settings  # type: ignore[assignment]
    assert HostState({"": net}).change() == ""


def test_a_pass_is_undone() -> None:
    net = Net()
    state, drawn = PassState(net, torch.device("cpu")), host_draws(torch.device("cpu"))
    given = torch.rand(2), random.random()
    net.seen += given[0]
    assert host_draws(torch.device("cpu")) != drawn
    state.restore()
    assert net.seen.tolist() == [0, 0]
    assert host_draws(torch.device("cpu")) == drawn
    assert torch.equal(torch.rand(2), given[0])
    assert random.random() == given[1]
