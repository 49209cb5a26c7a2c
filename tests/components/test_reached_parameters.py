from __future__ import annotations

import torch
from torch import nn

from evener.components.reached_parameters import ReachedParameters
from tests.tasks import NoGradients


def reached(found: ReachedParameters, model: nn.Module, x: torch.Tensor) -> set[str]:
    model.zero_grad()
    found.begin()
    model(x).sum().backward()
    return {name for name, parameter in model.named_parameters() if found.has(parameter)}


def test_a_parameter_without_a_gradient_is_seen_where_somebody_watches() -> None:
    model, found, x = NoGradients(), ReachedParameters(), torch.zeros(2, 6)
    given = {"layer.weight", "layer.bias"}
    assert reached(found, model, x) == given
    held = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    assert len(held) == 7  # the nodes, which live as long as somebody holds them, as DDP does
    found.watch(model.parameters())
    found.watch(model.parameters())
    assert reached(found, model, x) == given | {"step"}
    assert reached(found, model, x + 2) == given | {"step", "late.weight", "late.bias"}
    assert reached(found, model, x) == given | {"step"}, "what the pass before has reached is forgotten"
    found.stop()
    assert reached(found, model, x) == given
