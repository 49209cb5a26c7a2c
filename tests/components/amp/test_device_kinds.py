"""The types of devices of a module's parameters are known in each pass, whatever has become of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evener.components.amp.device_kinds import autocast_kinds


def test_a_module_has_the_types_of_devices_of_its_parameters() -> None:
    both = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"), nn.Tanh())
    assert autocast_kinds(both) == ["cpu"]
    assert autocast_kinds(both[1]) == [], "there is no autocast for it"


def test_a_module_without_parameters_computes_on_the_host_until_it_has_some() -> None:
    module = nn.Sequential(nn.Tanh())
    assert autocast_kinds(module) == ["cpu"]
    module.append(nn.Linear(2, 2, bias=False, device="meta"))
    assert autocast_kinds(module) == []


def test_parameters_that_are_moved_or_replaced_are_seen() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2))
    assert autocast_kinds(module) == ["cpu"]
    module.to("meta")
    assert autocast_kinds(module) == []
    module[2].bias = nn.Parameter(nn.Linear(2, 2).bias.detach())
    assert autocast_kinds(module) == ["cpu"]
    del module[0].weight, module[2].bias
    assert autocast_kinds(module) == []


def test_a_compiled_model_is_not_cut_where_it_asks() -> None:
    module = nn.Linear(2, 2)

    def asks(x: Tensor) -> Tensor:
        return x + 1 if autocast_kinds(module) == ["cpu"] else x

    compiled = torch.compile(asks, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
