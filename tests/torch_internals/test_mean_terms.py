"""The graph of a mean tells over how many terms it was taken, under the names that this version of PyTorch has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evener.torch_internals.mean_terms import mean_terms

TARGETS = torch.tensor([1, 2, -100, 0, -100])
MASK = TARGETS >= 0
WEIGHT = torch.tensor([1.0, 2.0, 4.0])


def each(outputs: Tensor) -> Tensor:
    return F.cross_entropy(outputs, TARGETS, reduction="none")


MEANS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "words": (lambda o: F.cross_entropy(o, TARGETS), 3),
    "weighted": (lambda o: F.cross_entropy(o, TARGETS, weight=WEIGHT), 7),
    "pixels": (lambda o: F.cross_entropy(o.t()[None], TARGETS[None]), 3),
    "half of it": (lambda o: F.cross_entropy(o, TARGETS).double() / 2 + 1, 3),
    "of two heads": (lambda o: F.cross_entropy(o, TARGETS) + 0.4 * F.cross_entropy(-o, TARGETS), 3),
    "by a mask": (lambda o: each(o)[MASK].mean(), 3),
    "selected": (lambda o: -(each(o).masked_select(MASK).mean()), 3),
}
OTHERS: dict[str, tuple[Callable[[Tensor], Tensor], list[float], list[float], int]] = {
    "a quotient": (lambda o: (each(o) * MASK).sum() / MASK.sum(), [], [3], 0),
    "of a number": (lambda o: 0.5 * (F.cross_entropy(o, TARGETS, reduction="sum") / 4), [], [4], 0),
    "of two": (lambda o: F.cross_entropy(o, TARGETS) + 0.1 * o.square().mean(), [3], [], 1),
    "of both": (lambda o: F.cross_entropy(o, TARGETS) - each(o).sum() / MASK.sum(), [3], [3], 0),
    "of two numbers": (lambda o: F.cross_entropy(o, TARGETS) + each(o)[:2][MASK[:2]].mean(), [2, 3], [], 0),
    "of losses": (lambda o: torch.stack([o.sum(), each(o).sum()]).mean(), [], [], 1),
    "of rows": (lambda o: each(o)[torch.tensor([0, 1])].mean(), [], [], 1),
    "of a leaf": (lambda o: o[0, 0], [], [], 1),
}


def outputs_of() -> Tensor:
    return torch.rand(5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_tells_its_terms(name: str) -> None:
    function, number = MEANS[name]
    found = mean_terms(function(outputs_of())).number
    assert found is not None
    assert float(found) == number


@pytest.mark.parametrize("name", OTHERS)
def test_other_numbers_tell_what_is_in_them(name: str) -> None:
    function, means, divisors, others = OTHERS[name]
    found = mean_terms(function(outputs_of()))
    assert [*map(float, found.means)] == means
    assert [*map(float, found.divisors)] == divisors
    assert found.others == others
    assert found.number is None
