"""A recording has leaves of its own, in the memory of the model's parameters, and leaves the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.components.cuda_graphs.own_leaves import own_leaves
from evener.components.cuda_graphs.unfit import leaves_of


class Model(nn.Module):
    """A weight that two modules have, one that is frozen, recurrent ones, and a word that a weight carries."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.out.weight = self.words.weight
        self.recurrent, self.frozen = nn.LSTM(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.frozen.weight.kind = "kept"  # type: ignore[assignment]
        self.several = nn.ParameterList([torch.ones(4), torch.zeros(4)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.recurrent(self.words(x) + self.several[1])[0] * self.several[0]
        scores: Tensor = self.out(self.frozen(hidden))
        return scores


def held(model: nn.Module) -> list[Any]:
    lists = [each for module in model.modules() for each in vars(module).values() if type(each) is list]
    return [*model.parameters(), *(each for some in lists for each in some)]


def test_gradients_go_to_other_leaves_of_the_same_memory() -> None:
    model, x = Model(), torch.arange(5).view(5, 1)
    before, parameters = held(model), list(model.parameters())
    kept = model(x).sum()  # its graph, which holds the nodes of the model's own leaves, lives on
    with own_leaves(model, parameters) as leaves:
        total = model(x).sum()
        assert leaves_of(total) <= set(leaves)
        assert not leaves_of(total) & leaves_of(kept)
        assert model.out.weight is model.words.weight
    assert [each.data_ptr() for each in leaves] == [p.data_ptr() for p in parameters]
    assert [each.requires_grad for each in leaves] == [p.requires_grad for p in parameters]
    assert [vars(each) for each in leaves] == [vars(p) for p in parameters]
    assert len(before) == len(held(model))
    assert all(one is other for one, other in zip(before, held(model), strict=True))
    total.backward()
    assert all(p.grad is None for p in parameters)
    grads = [each.grad for each in leaves if each.requires_grad]
    kept.backward()
    for grad, p in zip(grads, (p for p in parameters if p.requires_grad), strict=True):
        torch.testing.assert_close(grad, p.grad)


def test_the_model_has_its_parameters_again_if_a_pass_fails() -> None:
    model = Model()
    before = held(model)
    with pytest.raises(ValueError, match="the pass"), own_leaves(model, list(model.parameters())):
        raise ValueError("the pass")
    assert all(one is other for one, other in zip(before, held(model), strict=True))
